# SPDX-License-Identifier: Apache-2.0
"""An engine whose turns a test makes."""

from kvjax.serving import engine_thread
from kvjax.serving.changes import Change
from tests import drive


class Turned:
    """An engine whose turns a test makes.

    Attributes:
      engine: the engine. Its thread does not run, so a test may not wait for it.
      thread: its thread.
    """

    def __init__(self, monkeypatch, model, cache, **options):
        monkeypatch.setattr(engine_thread.EngineThread, "start", lambda thread: None)
        self.engine = drive.engine(model, cache, **options)
        self.thread = self.engine._thread

    def turn(self, number=1):
        for _ in range(number):
            self.thread._step()

    def change(self, *args, **options):
        """Makes a change, unless it waits for requests to finish. Returns its future."""
        change = Change(*args, **options)
        self.engine._inbox.changes.append(change)
        self.turn()
        return change.done

    def update(self, model, in_flight, **options):
        return self.change("update", model=model, in_flight=in_flight, **{"weights": "new", **options})

    def finish(self, handles):
        for _ in range(2000):
            if all(handle.done for handle in handles):
                return [handle.result(0) for handle in handles]
            self.turn()
        raise AssertionError("requests go on")
