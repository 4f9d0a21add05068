"""Convert SmolLM2-135M-Instruct with several schemes and measure what changed.

    python measure.py SmolLM2-135M-Instruct.Q4_1.gguf

writes results.json beside this file; write_readme.py makes README.md of it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import GenerationConfig

from depthroute.convert import compare, convert_checkpoint, to_stock
from depthroute.convert.check import _text
from depthroute.convert.gguf import gguf_tokenizer, load_gguf
from depthroute.training.environment import describe_environment

HERE = Path(__file__).parent
PROMPT = "The capital of France is"
SEQUENCES, LENGTH = 8, 256
SCHEMES: dict[str, dict[str, Any]] = {
    "delta_mhar": {"scheme": "delta_mhar", "block_layers": 4},
    "mhar, sum-scaled": {"scheme": "mhar", "read_scale": "sum"},
    "block_mhar, sum-scaled": {"scheme": "block_mhar", "read_scale": "sum", "block_layers": 4},
    "mhar, mean (not for conversion)": {"scheme": "mhar"},
}


def main(path: Path) -> None:
    original, tokenizer = load_gguf(path), gguf_tokenizer(path)
    ids, _ = _text(original, tokenizer, SEQUENCES, LENGTH)
    results: dict[str, Any] = {
        "checkpoint": {
            "file": path.name,
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        },
        "reading": reading(path, original, tokenizer),
        "original": {"answer": answers(original, tokenizer)},
        "schemes": {},
    }
    for name, residual in SCHEMES.items():
        converted = convert_checkpoint(original, residual=residual)
        results["schemes"][name] = {
            "residual": converted.config.residual,
            "residual_parameters": sum(p.numel() for p in converted.model.residual.parameters()),
            "check": compare(original, converted, tokenizer, sequences=SEQUENCES, length=LENGTH),
            "answer": answers(converted, tokenizer),
            "gradient_norms": gradient_norms(converted, ids[:1]),
        }
        print(name, json.dumps(results["schemes"][name], indent=1), flush=True)
    back = to_stock(convert_checkpoint(original, residual={"scheme": "additive"})).state_dict()
    results["round_trip_equal"] = all(torch.equal(back[key], value) for key, value in original.state_dict().items())
    results["environment"] = {**describe_environment(), "command": ["measure.py", path.name]}
    (HERE / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def reading(path: Path, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The file read a second time, by hand: dequantised tensors, rotary pairs half a head apart."""
    reader, config = gguf.GGUFReader(path), model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    ours = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights, equal, types = model.state_dict(), 0, {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        *block, kind, _ = tensor.name.split(".")
        if kind in heads:
            values = values.view(heads[kind], -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        key = (f"model.layers.{block[1]}." if block else "") + f"{ours[kind]}.weight"
        equal += torch.equal(weights[key], values)
        types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + 1
    return {
        "tensors": len(reader.tensors),
        "tensors_equal_to_a_reading_by_hand": equal,
        "tensor_types": types,
        "parameters": sum(p.numel() for p in model.parameters()),
        "rope_theta": config.rope_parameters["rope_theta"],
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "special_tokens": tokenizer.special_tokens_map,
        "prompt_pieces": tokenizer.convert_ids_to_tokens(tokenizer(PROMPT).input_ids),
    }


def answers(model: Any, tokenizer: Any) -> dict[str, str]:
    """The greedy continuation of the prompt, with fp32 and with bf16 weights."""
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():  # not .to(): that rounds the rotary frequencies too
        parameter.data = parameter.data.bfloat16()
    return {"fp32": answer(model, tokenizer), "bf16": answer(rounded, tokenizer)}


def answer(model: Any, tokenizer: Any) -> str:
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
    return tokenizer.decode(out[0, ids.shape[1] :])


def gradient_norms(model: Any, ids: torch.Tensor) -> dict[str, dict[str, list[float]]]:
    """The gradient norm at every site by kind of parameter: at step 0, and after one step of the new parameters."""
    residual = model.model.residual
    optimizer = torch.optim.AdamW(residual.parameters(), lr=1e-3, weight_decay=0.0)
    result: dict[str, dict[str, list[float]]] = {}
    for when in ("step 0", "step 1"):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        kinds = [name for name, _ in residual.reads[0].named_parameters()]
        result[when] = {k: [r.get_parameter(k).grad.norm().item() for r in residual.reads] for k in kinds}
        optimizer.step()
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]))
