# SPDX-License-Identifier: Apache-2.0
"""The nodes of a group: a row of words for each block.

A block has at most one findable node at a time, so that one row of words for each block is enough:

    generation, parent (block, generation), fill, level, priority      as in the record that stored the node
    namespace, depth                                                    of the whole prefix
    status, digest                                                      by whoever names the nodes (`naming.py`)
    digest of the prefix before, size, tokens, extra ids                the content that the digest is of

So records are copied by one assignment, and a block's content is put together once for its hash and for all wires.
"""

GENERATION, PARENT, PARENT_GENERATION, FILL, LEVEL, PRIORITY, NAMESPACE, DEPTH, STATUS = range(9)
DIGEST, ABOVE, SIZE, TEXT = 9, 13, 17, 18
DUE, SENT, PARTIAL = 0, 1, 2  # statuses: has no name yet; is known outside; never is, as a part of a block
