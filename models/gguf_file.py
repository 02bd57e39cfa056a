# SPDX-License-Identifier: Apache-2.0
"""GGUF files, the format of llama.cpp: config, weights and chat template under the names of a Hugging Face folder."""

from __future__ import annotations

import functools
import os
import pathlib
import re
from typing import Any

import numpy as np

from .fields import check_file, count, listed, only, token
from .gguf_tokenizer import make_tokenizer

try:
    import gguf
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[gguf]"') from error

# The dtype that each way to store a tensor has after it is read.
_DTYPES = {
    "F32": "F32", "F16": "F16", "BF16": "BF16",
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"), "F32"),
}  # fmt: skip
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_FIELDS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
_GEMMA_FIELDS = {
    "attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_ROPE_FIELDS = {
    "type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip
# Fields that a config is made of in another way, or that change no result.
_READ_ELSEWHERE = {
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
    "rope.dimension_count", "vocab_size", "rope.scaling.finetuned",
}  # fmt: skip
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "rope_freqs.weight": "model.rotary_emb.inv_freq",
}  # fmt: skip
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_GEMMA_27B_LAYERS = 62  # the size whose scores are scaled by another width than the heads'
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ENDS = ("eos", "eot", "eom")  # ids of tokens that end a text, a turn, a message


def open_gguf(path: str | os.PathLike) -> GgufFile:
    """The file, whose header is read again only after the file has changed."""
    check_file(pathlib.Path(path))
    status = os.stat(path)
    return _opened(os.fspath(path), status.st_mtime_ns, status.st_size)


class GgufFile:
    """A file with the names, shapes and values that a Hugging Face folder has; tensors are read as from `safe_open`.

    Attributes:
      config: the fields of a config.json.
      tokenizer_config: the fields of a tokenizer_config.json.
    """

    def __init__(self, path: str):
        """Reads the header.

        Raises:
          OSError: if the file cannot be read.
          ValueError: if it is broken or its model is not supported; names the field or the tensor.
        """
        try:
            reader = _Reader(path)
            values = {name: _value(field) for name, field in reader.fields.items()}
        except OSError:
            raise
        except Exception as error:  # whatever the library stumbles over
            raise ValueError(f"{path}: not a whole GGUF file ({error})") from error
        try:
            self._read(reader, values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self._path = path

    def _read(self, reader: _Reader, values: dict[str, Any]) -> None:
        if reader.endianess != gguf.GGUFEndian.LITTLE:
            raise ValueError("got numbers whose first byte is the highest, wanted the lowest first")
        only(values, "split.count", 0, 1, absent=0)
        architecture = only(values, "general.architecture", *_MODEL_TYPES)
        stored = {tensor.name: tensor for tensor in reader.tensors}
        for name, tensor in stored.items():
            if tensor.tensor_type.name not in _DTYPES:
                raise ValueError(f"{name}: got {tensor.tensor_type.name}, wanted {', '.join(_DTYPES)}")
            if not len(tensor.shape):
                raise ValueError(f"{name}: got a tensor without axes, wanted a vector or a matrix")
        self._values = values
        self.config = _config(architecture, values, stored)
        self.tokenizer_config = _tokenizer_config(values, self.config["vocab_size"])
        self._tensors = {
            _hf_name(name, architecture): _Tensor(name, tensor, self.config) for name, tensor in stored.items()
        }

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def keys(self) -> list[str]:
        """Names of tensors, that of the embedding first: vectors are float32 in files of all dtypes."""
        return sorted(self._tensors, key=lambda name: name != "model.embed_tokens.weight")

    def get_slice(self, name: str) -> _Tensor:
        """A tensor that is read where it is indexed."""
        return self._tensors[name]

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`, None if the file has none; a ValueError says what is wrong with it."""
        try:
            return make_tokenizer(self._values)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from error


@functools.lru_cache(maxsize=1)
def _opened(path: str, modified: int, size: int) -> GgufFile:
    return GgufFile(path)


class _Reader(gguf.GGUFReader):
    """The library's reader, which makes arrays of each element of an array: here an array is read in one piece.

    The vocabulary of SmolLM2 takes 0.1 s in place of 4, and an array that claims more than the file has is an error
    at once.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length, offset = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, kind]
        if kind == gguf.GGUFValueType.STRING:
            parts, end = _strings(memoryview(self.data), offset, length)
        else:
            numbers = self._get(offset, self.gguf_scalar_to_np[kind], min(length, self.data.size))
            if numbers.size < length:
                raise ValueError(f"an array of {length} numbers is longer than the file")
            parts, end = [numbers], offset + numbers.nbytes
        return end - orig_offs, parts, [*range(len(parts))], types


def _strings(data: memoryview, offset: int, length: int) -> tuple[list[memoryview], int]:
    """So many strings of a file from an offset on, and the offset of their end."""
    strings = []
    for _ in range(length):
        begin = offset + 8
        offset = begin + int.from_bytes(data[offset:begin], "little")
        if offset > len(data) or begin > len(data):
            raise ValueError("a string is longer than the file")
        strings.append(data[begin:offset])
    return strings, offset


def _value(field: gguf.ReaderField) -> Any:
    """The value of a field; a float32 as the shortest number that it is nearest to, such as 1e-05."""
    value = field.contents()
    return float(str(np.float32(value))) if field.types == [gguf.GGUFValueType.FLOAT32] else value


def _config(architecture: str, values: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json; a field that they cannot have is refused."""
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    optional = _GEMMA_FIELDS if architecture == "gemma3" else {}
    scaling = {f"rope.scaling.{name}" for name in _ROPE_FIELDS}
    readable = {*_FIELDS, *optional, *_READ_ELSEWHERE, *scaling, *({"rope.freq_base_swa"} if optional else ())}
    for name in own.keys() - readable:
        if own[name]:
            raise ValueError(f"{architecture}.{name}: got {own[name]!r:.80}, wanted none: it is not supported")
    for name in _FIELDS.keys() - own.keys():
        raise ValueError(f"{architecture}.{name}: got none, wanted a number")
    if "token_embd.weight" not in stored or len(stored["token_embd.weight"].shape) != 2:
        raise ValueError("token_embd.weight: got none, wanted a matrix")
    num_heads, hidden_size = count(own, "attention.head_count"), count(own, "embedding_length")
    head_dim = count(own, "attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        only(own, name, head_dim, absent=head_dim, of=architecture)
    vocab_size = int(stored["token_embd.weight"].shape[1])
    ends = [token(values, f"tokenizer.ggml.{name}_token_id", vocab_size) for name in _ENDS]
    return {
        "model_type": _MODEL_TYPES[architecture],
        **{name: own[field] for field, name in (_FIELDS | optional).items() if field in own},
        "vocab_size": vocab_size,
        "num_key_value_heads": own.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_output.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
        "bos_token_id": token(values, "tokenizer.ggml.bos_token_id", vocab_size),
        "eos_token_id": [end for end in dict.fromkeys(ends) if end is not None] or None,
        **(_gemma_fields(own, head_dim) if optional else {"rope_parameters": _rope(own, stored)}),
    }


def _rope(own: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """The rope of all layers. Llama 3's is a tensor of factors, which the frequencies that are made have to have."""
    rope = {"rope_theta": own.get("rope.freq_base", 10000.0), "rope_type": "default"}
    rope |= {name: own[key] for field, name in _ROPE_FIELDS.items() if (key := f"rope.scaling.{field}") in own}
    if rope["rope_type"] == "none":
        rope["rope_type"] = "default"
    if "rope_freqs.weight" in stored:
        rope |= {"rope_type": "llama3", "factor": float(np.max(stored["rope_freqs.weight"].data)), **_LLAMA3}
    return rope


def _gemma_fields(own: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """The ropes of both kinds of layers, and the scale of the scores."""
    width = own["embedding_length"] // own["attention.head_count"]
    sliding = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", 10000.0)}
    return {
        "query_pre_attn_scalar": width if own["block_count"] == _GEMMA_27B_LAYERS else head_dim,
        "rope_parameters": {"full_attention": _rope(own, {}), "sliding_attention": sliding},
    }


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
        **{f"{name}_token": texts[number] for name, number in ids.items() if number is not None},
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


class _Tensor:
    """A tensor as a Hugging Face folder has it, dequantised where it is indexed."""

    def __init__(self, name: str, stored: gguf.ReaderTensor, config: dict[str, Any]):
        self._stored, self._order, self._shift, self._theta = stored, None, 0.0, None
        module = name.removesuffix(".weight").removesuffix(".bias")
        if config["model_type"] == "llama" and module.endswith((".attn_q", ".attn_k")):
            self._order = _rotary_order(self.get_shape()[0], config["head_dim"])
        if config["model_type"] == "gemma3_text" and module.endswith("norm"):
            self._shift = 1.0  # norms have the factor itself, not what it differs from 1
        if name == "rope_freqs.weight":
            self._theta = config["rope_parameters"]["rope_theta"]

    def get_shape(self) -> list[int]:
        """The sizes of the axes."""
        return self._stored.shape[::-1].tolist()

    def get_dtype(self) -> str:
        """The dtype's name, as safetensors have it."""
        return _DTYPES[self._stored.tensor_type.name]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        first, *others = index if isinstance(index, tuple) else (index,)
        data, kind = self._stored.data.view(np.ndarray), self._stored.tensor_type
        if data.ndim == 1:  # perhaps bytes of blocks of elements
            values = gguf.dequantize(data, kind)
            values = values[first] if self._order is None else values[self._order[first]]
        else:
            rows = data[first] if self._order is None else data[self._order[first]]
            values = gguf.dequantize(rows, kind)[:, *others]
        if self._theta is not None:
            exponents = np.arange(len(data)) / len(data)
            return (self._theta**-exponents / data)[first].astype(np.float32)
        return values - np.float32(self._shift) if self._shift else values


def _rotary_order(num_rows: int, head_dim: int) -> np.ndarray | None:
    """For each row of Llama's queries or keys its row in the file, which has the two of a rotated pair side by side."""
    if num_rows % head_dim or head_dim % 2:
        return None  # of the wrong shape: refused by its name
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
