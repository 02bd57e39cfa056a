# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files, llama.cpp's format: config, weights and chat template, under the names of a Hugging Face folder."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import numpy as np

from .checkpoint import CONFIG, TOKENIZER_CONFIG, Tensor
from .fields import check_file, count, errors_in, listed, only, token
from .gguf_tokenizer import make_tokenizer
from .rope import Rope

try:
    import gguf
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[gguf]"') from error

# The dtype of a tensor after reading, by its format in the file.
_DTYPES = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"), "F32"),
}
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_GEMMA_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_ROPE_FIELDS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Fields that a config uses in other ways, and fields that do not affect results.
_READ_ELSEWHERE = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
    "rope.scaling.finetuned",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs.weight": "model.rotary_emb.inv_freq",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_27B_LAYERS = 62  # the size whose scores are scaled by another width than the heads'
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufFile:
    """A GGUF file with the methods of a `checkpoint.Folder`, and with its names, shapes and values.

    Attributes:
      path: the file's path.
    """

    def __init__(self, path: str | os.PathLike):
        """Reads the header.

        Raises:
          OSError: the file cannot be read.
          ValueError: the file is broken, or its model is not supported. The message names the field or the tensor.
        """
        self.path = pathlib.Path(path)
        check_file(self.path)
        with errors_in(self.path, "a whole GGUF file", Exception):  # the library raises many kinds of errors
            reader = _Reader(path)
            self._values = {name: _value(field) for name, field in reader.fields.items()}
        stored = {tensor.name: tensor for tensor in reader.tensors}
        with errors_in(self.path):
            if reader.endianess != gguf.GGUFEndian.LITTLE:
                raise ValueError("got numbers whose first byte is the highest, wanted the lowest first")
            only(self._values, "split.count", 0, 1, absent=0)
            architecture = only(self._values, "general.architecture", *_MODEL_TYPES)
            for name, tensor in stored.items():
                if tensor.tensor_type.name not in _DTYPES:
                    raise ValueError(f"{name}: got {tensor.tensor_type.name}, wanted {', '.join(_DTYPES)}")
            config = _config(architecture, self._values, stored)
            tokenizer_config = _tokenizer_config(self._values, config["vocab_size"])
        self._fields = {CONFIG: config, TOKENIZER_CONFIG: tokenizer_config}
        names = sorted(stored, key=lambda name: name != "token_embd.weight")  # the first tensor tells the dtype
        self._tensors = {_hf_name(name, architecture): _tensor(name, stored[name], config) for name in names}

    def file_of(self, name: str) -> pathlib.Path:
        """The file itself, for the fields of any name."""
        return self.path

    def fields(self, name: str) -> dict[str, Any]:
        """The fields of config.json or tokenizer_config.json. Other files have none."""
        return dict(self._fields.get(name, {}))

    def files(self) -> list[pathlib.Path]:
        """The files of the model: only this file."""
        return [self.path]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name. Vectors are float32 in files of any dtype."""
        return self._tensors

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`, or None if the file has none. A ValueError names the broken field."""
        with errors_in(self.path):
            return make_tokenizer(self._values)


class _Reader(gguf.GGUFReader):
    """A faster reader of the file's fields. The library makes numpy arrays for each element of an array.

    This reader reads an array in one piece, so the vocabulary of SmolLM2 takes 0.1 s instead of 4 s. It raises an error
    immediately if an array is longer than the file.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        offset = orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, kind]
        if kind == gguf.GGUFValueType.STRING:
            parts, end = _strings(memoryview(self.data), offset, length)
        else:
            numbers = self._get(offset, self.gguf_scalar_to_np[kind], min(length, self.data.size))
            if numbers.size < length:
                raise ValueError(f"an array of {length} numbers is longer than the file")
            parts = [numbers]
            end = offset + numbers.nbytes
        return end - orig_offs, parts, [*range(len(parts))], types


def _strings(data: memoryview, offset: int, length: int) -> tuple[list[memoryview], int]:
    """Reads `length` strings from an offset on. Returns them and the offset of their end."""
    strings = []
    for _ in range(length):
        begin = offset + 8
        offset = begin + int.from_bytes(data[offset:begin], "little")
        if offset > len(data) or begin > len(data):
            raise ValueError("a string is longer than the file")
        strings.append(data[begin:offset])
    return strings, offset


def _value(field: gguf.ReaderField) -> Any:
    """The value of a field. A float32 becomes the shortest decimal number for it, such as 1e-05."""
    value = field.contents()
    return float(str(np.float32(value))) if field.types == [gguf.GGUFValueType.FLOAT32] else value


def _config(architecture: str, values: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json. A field without a counterpart there is refused."""
    prefix = f"{architecture}."
    fields = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    optional = _GEMMA_FIELDS if architecture == "gemma3" else {}
    scaling = {f"rope.scaling.{name}" for name in _ROPE_FIELDS}
    for name in fields.keys() - {*_FIELDS, *optional, *_READ_ELSEWHERE, *scaling}:
        if fields[name]:
            raise ValueError(f"{architecture}.{name}: got {fields[name]!r:.80}, wanted none: it is not supported")
    for name in _FIELDS.keys() - fields.keys():
        raise ValueError(f"{architecture}.{name}: got none, wanted a number")
    if "token_embd.weight" not in stored or len(stored["token_embd.weight"].shape) != 2:
        raise ValueError("token_embd.weight: got none, wanted a matrix")
    num_heads = count(fields, "attention.head_count")
    hidden_size = count(fields, "embedding_length")
    head_dim = count(fields, "attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        only(fields, name, head_dim, absent=head_dim, section=architecture)
    vocab_size = int(stored["token_embd.weight"].shape[1])
    ends = [token(values, f"tokenizer.ggml.{name}_token_id", vocab_size) for name in ("eos", "eot", "eom")]
    return {
        "model_type": _MODEL_TYPES[architecture],
        **{name: fields[field] for field, name in (_FIELDS | optional).items() if field in fields},
        "vocab_size": vocab_size,
        "num_key_value_heads": fields.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_output.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [end for end in ends if end is not None] or None,
        "rope_theta": fields.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields, stored),
        "query_pre_attn_scalar": hidden_size // num_heads if fields["block_count"] == _GEMMA_27B_LAYERS else head_dim,
    }


def _rope_scaling(fields: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of a stretched rope. Llama 3 has a tensor of factors, which is compared with the frequencies later."""
    scaling = {name: fields[key] for field, name in _ROPE_FIELDS.items() if (key := f"rope.scaling.{field}") in fields}
    if "rope_freqs.weight" in stored:
        scaling |= {"rope_type": "llama3", "factor": float(np.max(stored["rope_freqs.weight"].data)), **_LLAMA3}
    return None if scaling.get("rope_type", "none") == "none" else scaling


def _tokenizer_config(values: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The fields of a tokenizer_config.json: the chat template, and the texts of special tokens."""
    texts = listed(values, "tokenizer.ggml.tokens") or []
    if len(texts) > vocab_size:
        raise ValueError(f"tokenizer.ggml.tokens: got {len(texts)}, wanted {vocab_size}, as token_embd.weight has")
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"} if texts else {}
    ids = {name: token(values, f"tokenizer.ggml.{field}_token_id", len(texts)) for field, name in names.items()}
    template = values.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {},
        **{f"{name}_token": texts[token_id] for name, token_id in ids.items() if token_id is not None},
        **({} if template is None else {"chat_template": template}),
    }


def _hf_name(name: str, architecture: str) -> str:
    """A tensor's name in a Hugging Face folder: blk.0.attn_q.weight is model.layers.0.self_attn.q_proj.weight."""
    if name in _NAMES:
        return _NAMES[name]
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    module, _, kind = name.rpartition(".")
    if layer is None:
        return f"{_NAMES[module]}.{kind}" if module in _NAMES else name
    names = _LAYER_NAMES | _GEMMA_NAMES if architecture == "gemma3" else _LAYER_NAMES
    return f"model.layers.{layer[1]}.{names[layer[2]]}.{layer[3]}" if layer[2] in names else name


def _tensor(name: str, stored: gguf.ReaderTensor, config: dict[str, Any]) -> Tensor:
    """A tensor with the shape and values of a Hugging Face folder. Reading dequantises it."""
    shape = tuple(stored.shape[::-1].tolist())
    kind = stored.tensor_type
    module = name.removesuffix(".weight").removesuffix(".bias")
    is_rotated = config["model_type"] == "llama" and module.endswith((".attn_q", ".attn_k"))
    # Gemma's norms have the factor itself here, but a folder has its difference from 1.
    shift = np.float32(config["model_type"] == "gemma3_text" and module.endswith("norm"))

    def read(index: tuple[slice, ...]) -> np.ndarray:
        rows = index[0]
        if is_rotated:  # the two rows of a rotated pair are adjacent
            pairs = np.arange(shape[0]).reshape(-1, config["head_dim"] // 2, 2)
            rows = pairs.swapaxes(1, 2).reshape(-1)[rows]
        data = stored.data.view(np.ndarray)
        if data.ndim == 1:  # perhaps bytes of blocks of elements
            values = gguf.dequantize(data, kind)[rows]
        else:
            values = gguf.dequantize(data[rows], kind)[:, *index[1:]]
        if name == "rope_freqs.weight":  # factors on wavelengths
            return Rope(config["rope_theta"]).frequencies(2 * len(data))[rows] / values
        return values - shift if shift else values

    return Tensor(shape, _DTYPES[kind.name], read)
