"""Make "tiny Kimi", the target of the quickstart and the tests: Kimi-K2.5's architecture, special tokens and turn format in under 12 MB.

A KimiK25ForConditionalGeneration wrapper around a DeepSeek-V3 text model (MLA, sigmoid + noaux_tc routing over 8 experts, YaRN) of 8 layers
and 5.8M parameters, and a byte-level BPE of 2,400 tokens followed by Kimi's special tokens in Kimi's order. It is trained on what every
CPython ships, its reference topics and the docstrings and short functions of its standard library, cast as questions and answers, thinking
and instant, with system messages, second turns and tool calls. 5 % of the subjects are held out.
Its answers are readable and keep their form; what they say about a name often belongs to another one. It is there to run pipelines on,
not to be asked.

Writes into --output-dir (default: over the one in this repository): config.json, generation_config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json,
chat_template.jinja, the processor SGLang wants and card.json (held-out loss, sizes, versions, hardware); into --prompts: 2,300 prompts.

    python3 scripts/make_tiny_kimi.py --steps 0 --output-dir .run/random_kimi --prompts .run/prompts.jsonl   # random weights, half a minute on a CPU
    python3 scripts/make_tiny_kimi.py --facts facts.json --write-facts   # read the standard library once, here ...
    python3 scripts/make_tiny_kimi.py --facts facts.json --minutes 2     # ... train on a GPU elsewhere

Needs torch, transformers >= 5 and tokenizers. The same --facts give the same tokenizer, prompts and samples on any machine.
"""
import argparse
import ast
import collections
import hashlib
import importlib
import inspect
import json
import math
import platform
import random
import re
import sysconfig
import tempfile
import time
import types
from pathlib import Path

import torch
import torch.nn.functional as F

# B rows, T tokens of a row, H hidden, E experts, I intermediate of an expert, V vocabulary
N_BPE, N_SPECIAL = 2400, 32
# MLA's sizes are bound by the triton kernels of SGLang 0.5.15. Decode takes keys as values, so it does not compile unless
# next_power_of_2(kv_lora_rank + qk_rope_head_dim) == next_power_of_2(kv_lora_rank). Prefill gives wrong values, now and then an illegal
# memory access, for v_head_dim 32 beside a qk head above 32 (seen with Triton 3.6 on an H200; right for v_head_dim 64 and 128).
KV_LORA_RANK, QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM, V_HEAD_DIM = 96, 64, 32, 64
# Kimi-K2.5's ids minus 163584. [UNK] and [PAD] close Kimi's block of 256, and ours of 32; the ids between are reserved tokens, as there.
SPECIAL_AT = {
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|start_header_id|>": 6, "<|end_header_id|>": 7,
    "[EOT]": 9, "<|im_system|>": 10, "<|tool_calls_section_begin|>": 11, "<|tool_calls_section_end|>": 12, "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14, "<|tool_call_end|>": 15, "<|im_middle|>": 17, "<|media_begin|>": 18, "<|media_content|>": 19,
    "<|media_end|>": 20, "<|media_pad|>": 21, "<think>": 22, "</think>": 23, "[UNK]": 30, "[PAD]": 31,
}
SPECIALS = [{at: name for name, at in SPECIAL_AT.items()}.get(at, f"<|reserved_token_{N_BPE + at}|>") for at in range(N_SPECIAL)]
ID = {name: N_BPE + at for at, name in enumerate(SPECIALS)}
MAX_POSITIONS = 4096
N_PROMPTS = 2300
MAX_BYTES = 12_000_000

CHAT_TEMPLATE = """\
{#- Kimi-K2.5's turn format. Reasoning is kept only after the last assistant message without tool calls. -#}
{%- macro text(m) -%}
{%- if m.content is string -%}{{ m.content }}
{%- elif m.content -%}{%- for part in m.content -%}
{%- if part.type in ('image', 'image_url') -%}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro calls(m) -%}
<|tool_calls_section_begin|>
{%- for c in m.tool_calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>
{%- if c.function.arguments is string -%}{{ c.function.arguments }}{%- else -%}{{ c.function.arguments | tojson }}{%- endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endmacro -%}
{%- set instant = thinking is defined and not thinking -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and not m.tool_calls -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
{%- if m.role in ('user', 'assistant') -%}<|im_{{ m.role }}|>{%- else -%}<|im_system|>{%- endif -%}
{{ m.name or m.role }}<|im_middle|>
{%- if m.role == 'assistant' -%}
<think>{%- if loop.index0 > ns.last and not instant -%}{{ m.reasoning_content or '' }}{%- endif -%}</think>
{{- text(m) -}}
{%- if m.tool_calls -%}{{ calls(m) }}{%- endif -%}
{%- elif m.role == 'tool' -%}
{{ '## Return of ' ~ m.tool_call_id ~ '\\n' }}{{ text(m) }}
{%- else -%}{{ text(m) }}{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{%- if instant -%}</think>{%- endif -%}
{%- endif -%}
"""

PROCESSOR = '''"""What SGLang asks of Kimi-K2.5's processor: the tokenizer and the media settings. Text only."""
from types import SimpleNamespace

from transformers import AutoTokenizer
from transformers.processing_utils import ProcessorMixin


class KimiK25Processor(ProcessorMixin):
    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer=None, **kwargs):
        self.tokenizer = tokenizer
        self.media_processor = self.image_processor = SimpleNamespace(media_proc_cfg=dict(
            patch_size=14, merge_kernel_size=2, in_patch_limit=64, patch_limit_on_one_side=16,
            fixed_output_tokens=None, image_mean=[0.5] * 3, image_std=[0.5] * 3))

    @classmethod
    def from_pretrained(cls, path, *args, **kwargs):
        return cls(AutoTokenizer.from_pretrained(path))
'''


# ---- the architecture ----
def text_config():
    return dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=N_BPE + N_SPECIAL, hidden_size=256,
        num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=96, kv_lora_rank=KV_LORA_RANK,
        qk_rope_head_dim=QK_ROPE_HEAD_DIM, qk_nope_head_dim=QK_NOPE_HEAD_DIM, v_head_dim=V_HEAD_DIM, intermediate_size=512, first_k_dense_replace=1, moe_layer_freq=1, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64, scoring_func="sigmoid", topk_method="noaux_tc", n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827, rms_norm_eps=1e-5, rope_theta=50000.0,
        rope_scaling=dict(type="yarn", factor=8.0, original_max_position_embeddings=512, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                          mscale_all_dim=1.0),
        max_position_embeddings=MAX_POSITIONS, hidden_act="silu", attention_bias=False, attention_dropout=0.0, initializer_range=0.03,
        num_nextn_predict_layers=0, tie_word_embeddings=False, use_cache=True, bos_token_id=ID["[BOS]"], eos_token_id=ID["<|im_end|>"],
        pad_token_id=ID["[PAD]"], dtype="bfloat16")


def wrapper_config():
    """No vocab_size at the top: SGLang takes the text model's. `vt_` names are the hub config's, the plain ones SGLang's."""
    sizes = dict(num_attention_heads=2, num_hidden_layers=1, hidden_size=16, intermediate_size=32)
    vision = dict(model_type="kimi_k25", patch_size=14, init_pos_emb_height=8, init_pos_emb_width=8, init_pos_emb_time=4,
                  pos_emb_type="divided_fixed", merge_kernel_size=[2, 2], video_attn_type="spatial_temporal", merge_type="sd2_tpool",
                  mm_projector_type="patchmerger", mm_hidden_size=sizes["hidden_size"], projector_hidden_act="gelu", projector_ln_eps=1e-5,
                  text_hidden_size=text_config()["hidden_size"], **sizes, **{f"vt_{key}": value for key, value in sizes.items()})
    return dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=text_config(), vision_config=vision,
                ignore_index=-100, media_placeholder_token_id=ID["<|media_pad|>"], bos_token_id=ID["[BOS]"], eos_token_id=ID["<|im_end|>"],
                pad_token_id=ID["[PAD]"], dtype="bfloat16", torch_dtype="bfloat16", tie_word_embeddings=False)


def vision_tensors(vision):
    """Small random vision weights: SGLang would serve whatever lay in memory for tensors the checkpoint lacks."""
    generator = torch.Generator().manual_seed(0)
    H, inner, merged = vision["hidden_size"], vision["intermediate_size"], 4 * vision["hidden_size"]
    block, tensors = "vision_tower.encoder.blocks.0.", {}
    for name, shape in {"vision_tower.patch_embed.proj": (H, 3, 14, 14), block + "wqkv": (3 * H, H), block + "wo": (H, H),
                        block + "mlp.fc0": (inner, H), block + "mlp.fc1": (H, inner), "mm_projector.proj.0": (merged, merged),
                        "mm_projector.proj.2": (vision["text_hidden_size"], merged)}.items():
        tensors[name + ".weight"], tensors[name + ".bias"] = torch.randn(*shape, generator=generator) * 0.02, torch.zeros(shape[0])
    for name in (block + "norm0", block + "norm1", "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"):
        tensors[name + ".weight"], tensors[name + ".bias"] = torch.ones(H), torch.zeros(H)
    tensors["vision_tower.patch_embed.pos_emb.weight"] = torch.randn(8, 8, H, generator=generator) * 0.02
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def dense_experts(self, x, index, weights):
    """All experts on all tokens, unchosen ones weighted 0: two products of static shape instead of a loop. x [N, H] -> [N, H].

    Equal to DeepseekV3Experts.forward, whose parameters (gate_up_proj [E, 2I, H], down_proj [E, H, I]) it uses; counts the load on the way.
    """
    share = torch.zeros(len(x), self.num_experts, device=x.device).scatter(1, index, weights.float())  # (N, E)
    if self.training:
        self.load += (share.detach() > 0).sum(0)
    gate, up = F.linear(x, self.gate_up_proj.flatten(0, 1)).view(len(x), self.num_experts, -1).chunk(2, dim=-1)  # (N, E, I)
    inner = self.act_fn(gate) * up * share[..., None]
    return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).flatten(1))


def build_model(device, dropout):
    """DeepseekV3ForCausalLM in float32 with SGLang's norms and, for training, dense experts and dropout on what enters the residual."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    model = DeepseekV3ForCausalLM._from_config(DeepseekV3Config(**text_config()), attn_implementation="sdpa", dtype=torch.float32)
    model.to(device)
    use_serving_norms(model)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            part.register_forward_hook(lambda module, _, out: F.dropout(out, dropout, module.training) if torch.is_tensor(out)
                                       else (F.dropout(out[0], dropout, module.training), *out[1:]))
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.forward = types.MethodType(dense_experts, layer.mlp.experts)
            layer.mlp.experts.load = torch.zeros(layer.mlp.experts.num_experts, device=device)
    return model


def use_serving_norms(model):
    """transformers gives MLA's two inner norms an epsilon of 1e-6 whatever the config says; SGLang gives them the config's (1e-5)."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = text_config()["rms_norm_eps"]


# ---- facts: what the standard library says about itself ----
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "ensurepip", "pydoc_data", "distutils", "tkinter",
                   "encodings", "__pycache__"}
# The Python versions of modules that C implements are the documented ones.
PUBLIC_NAME = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io", "_collections_abc": "collections.abc"}
C_MODULES = ["builtins", "math", "cmath", "itertools", "time", "sys", "functools", "collections", "array", "zlib", "binascii", "struct", "gc"]


def trim(text, limit):
    """Whole paragraphs up to `limit` characters; of a first paragraph that is longer, whole sentences."""
    kept = ""
    for paragraph in text.strip("\n").split("\n\n"):
        if kept and len(kept) + len(paragraph) > limit:
            break
        kept += ("\n\n" if kept else "") + paragraph
    if len(kept) <= limit:
        return kept
    end = max(kept.rfind(mark, 0, limit) for mark in (". ", ".\n", "\n"))
    return kept[:end + 1].rstrip() or kept[:limit]


def first_sentence(text):
    flat = " ".join(text.split("\n\n")[0].split())
    sentence = re.match(r".{20,}?[.!?](?= [A-Z]|$)", flat)
    return (sentence[0] if sentence else flat)[:300]


def parameters_of(arguments):
    """[[name, default or None]] of an ast.arguments, without self."""
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(plain, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    named = [[argument.arg, default and ast.unparse(default)] for argument, default in pairs
             if argument.arg not in ("self", "cls", "type", "module")]
    return named + [[stars + rest.arg, None] for stars, rest in (("*", arguments.vararg), ("**", arguments.kwarg)) if rest]


def python_facts(root):
    """Modules, classes, methods and functions of the source files below `root`, read by ast: nothing is imported."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(PUBLIC_NAME.get(part, part) for part in parts if part != "__init__")
        if SKIPPED_FOLDERS & set(parts) or parts[0].startswith("config-") or any(part.startswith("_") for part in module.split(".")):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        public = [node for node in tree.body if isinstance(node, (*functions, ast.ClassDef)) and not node.name.startswith("_")]
        yield dict(kind="module", name=module, owner=module, doc=ast.get_docstring(tree), members=[node.name for node in public])
        for node in public:
            methods = [item for item in getattr(node, "body", []) if isinstance(node, ast.ClassDef) and isinstance(item, functions)
                       and not item.name.startswith("_")]
            if isinstance(node, ast.ClassDef):
                yield dict(kind="class", name=f"{module}.{node.name}", owner=module, doc=ast.get_docstring(node),
                           members=[item.name for item in methods], bases=[ast.unparse(base) for base in node.bases])
            callables = [(node, module, "function")] * isinstance(node, functions)
            for item, owner, kind in callables + [(method, f"{module}.{node.name}", "method") for method in methods]:
                doc = ast.get_docstring(item)
                if doc is not None:
                    item.body = item.body[1:] or [ast.Pass()]
                item.decorator_list = []
                source = ast.unparse(item)
                yield dict(kind=kind, name=f"{owner}.{item.name}", owner=owner, doc=doc, signature=source.split(":\n")[0] if "\n" in source else source,
                           parameters=parameters_of(item.args), source=source if len(source) <= 700 else None)


def compiled_facts():
    """Functions and methods without Python source: their docstrings and text signatures."""
    for module_name in C_MODULES:
        for name, value in sorted(vars(importlib.import_module(module_name)).items()):
            if name.startswith("_") or inspect.isfunction(value) or inspect.ismodule(value) or not callable(value):
                continue
            prefix = "" if module_name == "builtins" else f"{module_name}."
            things = [("class" if inspect.isclass(value) else "function", prefix + name, module_name, value)]
            if inspect.isclass(value) and not issubclass(value, BaseException):
                things += [("method", f"{prefix}{name}.{key}", prefix + name, item) for key, item in sorted(vars(value).items())
                           if not key.startswith("_") and inspect.ismethoddescriptor(item)]
            for kind, full, owner, thing in things:
                doc, text = inspect.getdoc(thing), getattr(thing, "__text_signature__", None)
                fact = dict(kind=kind, name=full, owner=owner, doc=doc)
                if text and "<" not in text and kind != "class":  # <unrepresentable> defaults parse as nothing
                    signature = f"def {full.split('.')[-1]}{text.replace('$', '')}"
                    fact |= dict(signature=signature, parameters=parameters_of(ast.parse(f"{signature}: pass").body[0].args))
                yield fact


def topic_facts():
    """Sections of the language reference that pydoc ships, each in pieces short enough for an answer."""
    from pydoc_data.topics import topics
    for name, text in sorted(topics.items()):
        pieces = re.split(r"(?m)^([^\n]+)\n([*=~^\-])\2{2,}\n", text.strip() + "\n")  # text, (title, rule, text)*
        for title, body in zip(pieces[1::3], pieces[3::3]):
            chunks, rest = [], body.strip("\n")
            while rest.strip():
                chunks.append(trim(rest, 700))
                rest = rest[len(chunks[-1]):].strip("\n")
            if chunks:
                yield dict(kind="topic", name=title.replace('"', "`").strip(), owner=name, doc=chunks[0], chunks=chunks)


def collect_facts():
    """One fact a name, sorted; those with nothing to say left out."""
    facts = {}
    for fact in [*python_facts(Path(sysconfig.get_paths()["stdlib"])), *compiled_facts(), *topic_facts()]:
        fact["doc"] = inspect.cleandoc(fact["doc"]) if fact["kind"] != "topic" and fact.get("doc") else fact.get("doc")
        useful = len(fact["doc"] or "") >= 20 or fact.get("source") or len(fact.get("members", [])) >= 2
        if useful and not fact["name"].startswith(("antigravity", "this")):
            facts.setdefault(fact["name"], fact)
    return dict(python=platform.python_version(), facts=[facts[name] for name in sorted(facts)])


# ---- conversations about them ----
QUESTIONS = {
    "what": ["What does {n} do?", "What is {n} for?", "Explain {n}.", "Tell me about {n}.", "How does {n} work?", "I came across {n}. What is it?",
             "Describe {n} for a beginner.", "Can you explain what {n} does?", "What is {n} in Python?", "How do I use {n}?", "When would I use {n}?",
             "I don't understand {n}. Help me.", "Please document {n}."],
    "short": ["In one sentence: what is {n}?", "Give me a one-line summary of {n}.", "Briefly, what does {n} do?", "Say in a few words what {n} is for."],
    "signature": ["Show the signature of {n}.", "Which parameters does {n} take?", "What arguments can I pass to {n}?", "How do I call {n}?",
                  "What is the signature of {n}?", "What are the defaults of {n}?"],
    "source": ["Show me the source code of {n}.", "How is {n} implemented?", "What does the code of {n} look like?", "Print the implementation of {n}."],
    "members": ["What is in {n}?", "List the public names of {n}.", "What does {n} offer?", "Which names does {n} define?"],
    "where": ["Where do I find {s}?", "Which module has {s}?", "How do I import {s}?", "Where is {s} defined?"],
    "summarize": ["Summarize this in one sentence:\n\n{d}", "What is the main point of this text?\n\n{d}", "Shorten this:\n\n{d}"],
    "parameters": ["List the parameters of this function:\n\n{g}", "Which of these parameters have a default?\n\n{g}", "Explain this signature:\n\n{g}"],
}
TOPIC_QUESTIONS = ["What does the Python reference say about {n}?", "Explain {n}.", "Tell me about {n} in Python.", "What are the rules for {n}?",
                   "I want to learn about {n}.", "How does Python handle {n}?"]
SECOND_QUESTIONS = {"signature": ["Which parameters does it take?", "And its signature?", "How do I call it?"], "short": ["In one sentence, please.", "Shorter?"],
                    "source": ["Show me its source code.", "How is it implemented?"], "members": ["What does it contain?", "Which names does it define?"],
                    "where": ["Where do I find it?", "How do I import it?"], "more": ["Go on.", "What comes next?", "Tell me more.", "Continue, please."]}
SYSTEMS = ["You are a helpful assistant for Python programmers.", "You are Kimi, an assistant who knows the Python standard library.",
           "Answer questions about Python. Quote the documentation where you can."]
LOOKUP = [{"type": "function", "function": {"name": "lookup", "description": "Documentation of a Python name.", "parameters": {
    "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}}]


def exchange(fact, what, rng):
    """(question, reasoning, answer) of the kind `what` about one fact, or None where the fact has nothing for it."""
    kind, name, short, doc = fact["kind"], fact["name"], fact["name"].split(".")[-1], fact["doc"] or ""
    signature, parameters, members = fact.get("signature"), fact.get("parameters"), fact.get("members") or []
    code = f"`{name}`"
    place = f"{code} is a module of the standard library." if kind == "module" else \
        f"{code} is a built-in {kind}." if fact["owner"] == "builtins" else f"{code} is a {kind} of `{fact['owner']}`."
    opening = rng.choice([f"The user asks about {code}.", f"This is about {code}.", f"The question is about {code}.", f"I am asked about {code}."])
    if kind == "topic":
        if what not in ("what", "short"):
            return None
        question = rng.choice(TOPIC_QUESTIONS if what == "what" else QUESTIONS["short"]).format(n=name)
        reasoning = f"The user asks about the section {name} of the Python reference. It begins: \"{' '.join(doc.split()[:9])}\". " + (
            "I will quote its first part." if what == "what" else "One sentence is enough.")
        return question, reasoning, doc if what == "what" else first_sentence(doc)
    question = rng.choice(QUESTIONS[what]).format(
        n=rng.choice([code, code, name, f"the {kind} {code}"]), s=rng.choice([f"`{short}`", short, f"the {kind} `{short}`"]), d=trim(doc, 500),
        g=f"```python\n{signature}\n```")
    if what == "what" and len(doc) >= 20:
        plan = rng.choice(["I will say what it is and then give its documentation", "First I say where it belongs, then what its documentation says",
                           "A short introduction and the documentation should do"])
        reasoning = f"{opening} {place} {plan}, which begins: \"{' '.join(doc.split()[:8])}\"."
        return question, reasoning, f"{place}\n\n{trim(doc, 700)}"
    if what == "short" and len(doc) >= 20:
        return question, f"{opening} {place} One sentence is wanted, so the first one of its documentation will do.", first_sentence(doc)
    if what == "signature" and signature and len(signature) <= 400:
        count = f"{len(parameters)} parameter{'s' * (len(parameters) != 1)}"
        names, described = ", ".join(p for p, _ in parameters), ", ".join(f"`{p}`" + (f" (default `{d}`)" if d else "") for p, d in parameters)
        reasoning = f"{opening} {place} It takes {count}: {names or 'none'}. I will show the signature and then list them."
        return question, reasoning, f"```python\n{signature}\n```\n\n{code} takes {count}: {described or 'none'}."
    if what == "source" and fact.get("source"):
        lines = fact["source"].count("\n") + 1
        return question, f"{opening} {place} Its implementation has {lines} lines. I will print it as a code block.", f"```python\n{fact['source']}\n```"
    if what == "members" and len(members) >= 2:
        noun = "methods" if kind == "class" else "names"
        reasoning = f"{opening} It is a {kind} with {len(members)} public {noun}, {members[0]} first. A list is the clearest answer."
        more = f"\n\nand {len(members) - 20} more." if len(members) > 20 else ""
        return question, reasoning, f"The {kind} {code} has these public {noun}:\n\n" + "\n".join(f"- `{member}`" for member in members[:20]) + more
    if what == "where" and kind in ("function", "class") and fact["owner"] != "builtins":
        reasoning = f"The user looks for {short}. It is a {kind} of the module {fact['owner']}. I will show the import."
        return question, reasoning, f"`{short}` is a {kind} of the module `{fact['owner']}`:\n\n```python\nfrom {fact['owner']} import {short}\n```"
    if what == "summarize" and len(doc) >= 60:
        reasoning = f"The text begins: \"{' '.join(doc.split()[:8])}\". Its first sentence says the most, so I will give that."
        return question, reasoning, first_sentence(doc)
    if what == "parameters" and signature and parameters and len(signature) <= 300:
        reasoning = f"The names between the parentheses are {', '.join(p for p, _ in parameters)}. I will go through them in order."
        return question, reasoning, f"`{short}` has:\n\n" + "\n".join(f"- `{p}`" + (f", default `{d}`" if d else ", no default") for p, d in parameters)
    return None


def conversations(fact, seed):
    """Training conversations about one fact: {"messages", "thinking", "tools"}; every assistant message in them is learned."""
    rng, out = random.Random(f"{seed}:{fact['name']}"), []

    def say(question, reasoning, answer):
        return [{"role": "user", "content": question}, {"role": "assistant", "reasoning_content": reasoning, "content": answer}]

    def add(messages, tools=None, thinking=None):
        out.append(dict(messages=messages, tools=tools, thinking=rng.random() < 0.5 if thinking is None else thinking))

    for thinking in (True, False):  # the main question in both modes
        if first := exchange(fact, "what", rng):
            add(say(*first), thinking=thinking)
    for what in ("short", "signature", "source", "members", "where", "summarize", "parameters"):
        if turn := exchange(fact, what, rng):
            add(say(*turn))
    if first := exchange(fact, "what", rng):
        if rng.random() < 0.3:
            add([{"role": "system", "content": rng.choice(SYSTEMS)}] + say(*first))
        follow = [what for what in SECOND_QUESTIONS if what != "more" and exchange(fact, what, rng)]
        if follow and rng.random() < 0.4:
            what = rng.choice(follow)
            _, reasoning, answer = exchange(fact, what, rng)
            add(say(*first) + say(rng.choice(SECOND_QUESTIONS[what]), reasoning, answer))
        if rng.random() < 0.15 and fact["kind"] != "topic":
            call = {"id": "functions.lookup:0", "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"name": fact["name"]})}}
            add([{"role": "user", "content": first[0]},
                 {"role": "assistant", "reasoning_content": f"I will look up `{fact['name']}` before I answer.", "content": "", "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": call["id"], "content": trim(fact["doc"], 400)},
                 {"role": "assistant", "reasoning_content": f"The documentation of `{fact['name']}` is there. I will answer with it.",
                  "content": f"`{fact['name']}`: {trim(fact['doc'], 400)}"}], tools=LOOKUP)
        for before, after in zip(fact.get("chunks", []), fact.get("chunks", [])[1:]):  # read a section on, piece by piece
            reasoning = f"The user wants to read on about {fact['name']}. The next part begins: \"{' '.join(after.split()[:8])}\"."
            add(say(first[0], first[1], before) + say(rng.choice(SECOND_QUESTIONS["more"]), reasoning, after))
    return out


def held_out(fact):
    return int(hashlib.sha256(fact["name"].encode()).hexdigest(), 16) % 20 == 0


def make_prompts(facts, seed):
    """N_PROMPTS prompts, their ids t-... about trained subjects (in a phrasing that may be new) and h-... about held-out ones."""
    rng, prompts = random.Random(f"{seed}:prompts"), {}
    kinds = ["what"] * 5 + ["signature"] * 2 + ["source", "members", "where", "short"]
    pool = sorted(facts, key=lambda fact: hashlib.sha256(f"{seed}:{fact['name']}".encode()).digest())
    for fact in [f for f in pool if held_out(f)] * 2 + [f for f in pool if not held_out(f)]:
        what, split = rng.choice(kinds), "h" if held_out(fact) else "t"
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", fact["name"])[-48:].strip("-")
        turn = exchange(fact, what, rng)
        if turn is None or f"{split}-{what}-{slug}" in prompts or len(turn[0]) > 200:
            continue
        messages = [{"role": "user", "content": turn[0]}]
        if rng.random() < 0.06:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
        if rng.random() < 0.06 and (second := exchange(fact, "short", rng)):
            messages += [{"role": "assistant", "content": second[2]}, {"role": "user", "content": rng.choice(SECOND_QUESTIONS["more"])}]
        prompts[f"{split}-{what}-{slug}"] = messages
        if len(prompts) == N_PROMPTS:
            break
    rows = [{"id": key, "messages": messages} for key, messages in prompts.items()]
    rng.shuffle(rows)
    return rows


# ---- tokens ----
def train_tokenizer(facts):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    texts = []
    for fact in facts:
        if not held_out(fact):
            texts += [*fact.get("chunks", [fact["doc"] or ""]), fact.get("source") or "", *(exchange(fact, "what", random.Random(0)) or [])[:2]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=N_BPE, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                                             show_progress=False))
    # As in Kimi's tokenizer, think and tool marks survive skip_special_tokens: parsers of the text need them.
    tokenizer.add_tokens([AddedToken(name, special="think" not in name and "tool_call" not in name, normalized=False) for name in SPECIALS])
    assert [tokenizer.token_to_id(name) for name in SPECIALS] == list(range(N_BPE, N_BPE + N_SPECIAL))
    return tokenizer


def response_text(message, thinking):
    """What the model emits for an assistant message after the prompt that ends in `<think>` or `<think></think>`."""
    calls = "".join(f"<|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>{call['function']['arguments']}<|tool_call_end|>"
                    for call in message.get("tool_calls", []))
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return (message["reasoning_content"] + "</think>" if thinking else "") + message["content"] + section + "<|im_end|>"


def encode_samples(tokenizer, talks, max_length):
    """(prompt ids, response ids) of every assistant message, the prompt exactly as serving renders it. Longer ones are left out."""
    prompts, responses = [], []
    for talk in talks:
        for i, message in enumerate(talk["messages"]):
            if message["role"] == "assistant":
                prompts.append(tokenizer.apply_chat_template(talk["messages"][:i], tools=talk["tools"], thinking=talk["thinking"],
                                                             add_generation_prompt=True, tokenize=False))
                responses.append(response_text(message, talk["thinking"]))
    batches = [tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [] for texts in (prompts, responses)]
    return [pair for pair in zip(*batches) if len(pair[0]) + len(pair[1]) <= max_length]


def pack(samples, T):
    """Rows of T tokens, next fit: ids, positions (from 0 in each sample), sample number (-1: padding), learned (a response token)."""
    rows, room = [], 0
    for prompt, response in samples:
        if room < len(prompt) + len(response):
            rows.append(([], [], [], []))
            room = T
        ids, positions, owner, learned = rows[-1]
        n, number = len(prompt) + len(response), (owner[-1] + 1 if owner else 0)
        ids += prompt + response
        positions += range(n)
        owner += [number] * n
        learned += [False] * len(prompt) + [True] * len(response)
        room -= n
    pad = lambda column, value: torch.tensor([row[column] + [value] * (T - len(row[column])) for row in rows])
    return pad(0, ID["[PAD]"]), pad(1, 0), pad(2, -1), pad(3, False)


# ---- training ----
def row_loss(model, ids, positions, owner, learned):
    """Summed cross-entropy and number of the response tokens in rows [B, T], each sample attending only to itself."""
    T = ids.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
    mask = (owner[:, None, :, None] == owner[:, None, None, :]) & causal  # (B, 1, T, T)
    hidden = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1]).float()  # position p predicts token p+1
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return (loss * learned[:, 1:]).sum(), learned[:, 1:].sum()


@torch.no_grad()
def held_out_loss(model, data, B, device, autocast):
    model.eval()
    total = torch.zeros(2, device=device)
    for i in range(0, len(data[0]), B):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            total += torch.stack([value.float() for value in row_loss(model, *(column[i:i + B].to(device) for column in data))])
    model.train()
    return (total[0] / total[1]).item()


def train(model, data, validation, args, device):
    """AdamW, cosine over --steps or --minutes of wall clock; the router's bias follows the load (noaux_tc). Ends with the weights that
    did best on the held-out subjects, which are the last ones unless the model has begun to learn by heart."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    scales = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}], lr=args.lr,
                                  betas=(0.9, 0.95), fused=True)
    order, generator = [], torch.Generator().manual_seed(args.seed)
    began, step, done, seen, next_check, best = time.monotonic(), 0, 0.0, 0, 0.1, (math.inf, None)
    while True:
        if len(order) < args.rows:
            order += torch.randperm(len(data[0]), generator=generator).tolist()
        rows, order = order[:args.rows], order[args.rows:]
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (done + 1e-3) / 0.02) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            total, count = row_loss(model, *(column[rows] for column in data))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for layer in model.model.layers:
                if hasattr(layer.mlp, "experts"):
                    load = layer.mlp.experts.load
                    layer.mlp.gate.e_score_correction_bias += 1e-3 * (load.mean() - load).sign()
                    load.zero_()
        step, seen = step + 1, seen + len(rows) * data[0].shape[1]
        if step % 10 == 0 or args.steps:
            loss = (total / count).item()  # waits for the device, so that the clock below is an honest one
        elapsed = time.monotonic() - began
        done = min(1.0, step / args.steps if args.steps else elapsed / (60 * args.minutes))
        if step % 100 == 0:
            log(f"step {step} | done {done:.0%} | loss {loss:.3f} | lr {optimizer.param_groups[0]['lr']:.1e} | {seen / elapsed:,.0f} tok/s")
        if done >= next_check or done == 1.0:
            next_check += 0.1
            value = held_out_loss(model, validation, args.rows, device, device == "cuda")
            log(f"step {step} | held-out loss {value:.4f}")
            if value < best[0]:
                best = value, {name: tensor.clone() for name, tensor in model.state_dict().items()}
                best_step = step
        if done == 1.0:
            break
    model.load_state_dict(best[1])
    return dict(steps=step, kept_step=best_step, tokens_seen=seen, seconds=round(time.monotonic() - began, 1))


# ---- artifacts ----
def log(event):
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} tiny_kimi {event}", flush=True)


def dump(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_static_files(folder, tokenizer):
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    dump(folder / "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="[BOS]", eos_token="<|im_end|>", unk_token="[UNK]", pad_token="[PAD]",
        model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False, add_prefix_space=False))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "kimi_k25_processor.py").write_text(PROCESSOR)
    for name in ("processor_config.json", "preprocessor_config.json"):
        dump(folder / name, {"auto_map": {"AutoProcessor": "kimi_k25_processor.KimiK25Processor"}, "processor_class": "KimiK25Processor"})
    dump(folder / "config.json", wrapper_config())
    dump(folder / "generation_config.json", dict(eos_token_id=ID["<|im_end|>"], pad_token_id=ID["[PAD]"], max_length=MAX_POSITIONS))


def write_weights(model, folder):
    """model.safetensors with the hub's names. Reads it back into an untouched DeepseekV3ForCausalLM: logits must be equal."""
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3ForCausalLM
    with tempfile.TemporaryDirectory() as temporary:
        for name, tensor in model.state_dict().items():
            if "e_score_correction_bias" not in name:  # float32 in Kimi's checkpoint too
                tensor.copy_(tensor.to(torch.bfloat16).float())  # the model now computes with what is saved
        model.save_pretrained(temporary)
        text = load_file(f"{temporary}/model.safetensors")
        text = {name: tensor if "e_score_correction_bias" in name else tensor.to(torch.bfloat16) for name, tensor in text.items()}
        save_file(text, f"{temporary}/model.safetensors", metadata={"format": "pt"})
        dump(Path(temporary) / "config.json", text_config())
        stock = DeepseekV3ForCausalLM.from_pretrained(temporary, dtype=torch.float32, attn_implementation="sdpa").to(model.device).eval()
    use_serving_norms(stock)
    ids = torch.randint(0, N_BPE, (2, 64), device=model.device, generator=torch.Generator(model.device).manual_seed(0))
    with torch.no_grad():
        difference = (stock(ids).logits - model.eval()(ids).logits).abs().max().item()
    if not difference < 1e-3:
        raise SystemExit(f"make_tiny_kimi: the exported weights give other logits than the trained model (by {difference}).")
    tensors = {f"language_model.{name}": tensor for name, tensor in text.items()} | vision_tensors(wrapper_config()["vision_config"])
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return stock, difference


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).resolve().parent / "tiny_kimi")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).resolve().parent.parent / "configs/quickstart_prompts.jsonl",
                        help="where the quickstart's prompts go")
    parser.add_argument("--facts", type=Path, help="corpus facts, from a run with --write-facts (default: read this Python's library)")
    parser.add_argument("--write-facts", action="store_true", help="write --facts and stop")
    parser.add_argument("--minutes", type=float, default=2.0, help="training time by the wall clock")
    parser.add_argument("--steps", type=int, help="train so many steps instead; 0: random weights")
    parser.add_argument("--rows", type=int, default=32, help="rows a step")
    parser.add_argument("--row-length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.facts is None and args.write_facts or args.facts and not args.write_facts and not args.facts.is_file():
        parser.error(f"--facts {args.facts}: name the file to write or an existing one to read.")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # 1. the corpus
    if args.write_facts or args.facts is None:
        collected = collect_facts()
    else:
        collected = json.loads(args.facts.read_text())
    if args.write_facts:
        args.facts.write_text(json.dumps(collected))
        return log(f"{len(collected['facts'])} facts of Python {collected['python']} | done: {args.facts}")
    facts = collected["facts"]
    log(f"{len(facts)} facts of Python {collected['python']}, {sum(map(held_out, facts))} held out")

    # 2. tokenizer and everything that needs no training
    args.output_dir.mkdir(parents=True, exist_ok=True)
    prompts = make_prompts(facts, args.seed)
    write_static_files(args.output_dir, train_tokenizer(facts))
    args.prompts.write_text("".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in prompts))
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(args.output_dir)

    # 3. samples in packed rows
    rng, splits = random.Random(args.seed), {}
    for name, keep in (("train", lambda fact: not held_out(fact)), ("held_out", held_out)):
        talks = [talk for fact in facts if keep(fact) for talk in conversations(fact, args.seed)] if args.steps != 0 else []
        samples = encode_samples(tokenizer, talks, args.row_length)
        rng.shuffle(samples)
        splits[name] = samples
        sizes = sum(len(response) for _, response in samples), sum(len(prompt) + len(response) for prompt, response in samples)
        log(f"{name}: {len(talks)} conversations, {len(samples)} answers, {sizes[0]:,} answer tokens of {sizes[1]:,}")

    # 4. training
    torch.manual_seed(args.seed)
    model = build_model(device, args.dropout).train()
    result, loss = dict(steps=0), None
    if args.steps != 0:
        rows, validation = pack(splits["train"], args.row_length), pack(splits["held_out"], args.row_length)
        result = train(model, [column.to(device) for column in rows], validation, args, device)

    # 5. export, then measure what was exported
    stock, difference = write_weights(model, args.output_dir)
    if args.steps != 0:
        loss = held_out_loss(stock, validation, args.rows, device, False)
        for prompt, _ in splits["held_out"][:3]:
            output = stock.generate(torch.tensor([prompt], device=device), max_new_tokens=120, do_sample=False)
            log(f"sample: {tokenizer.decode(output[0])!r}")
    import tokenizers
    import transformers
    ids = collections.Counter(row["id"][0] for row in prompts)
    dump(args.output_dir / "card.json", dict(
        model="tiny Kimi: Kimi-K2.5's architecture and turn format, trained by scripts/make_tiny_kimi.py; made for tests, "
              "its answers are not to be relied on",
        parameters=sum(p.numel() for p in model.parameters()), held_out_loss_per_answer_token=loss and round(loss, 4),
        corpus=dict(python=collected["python"], facts=len(facts), facts_held_out=sum(map(held_out, facts)), **{
            name: dict(answers=len(samples), answer_tokens=sum(len(r) for _, r in samples), tokens=sum(len(p) + len(r) for p, r in samples))
            for name, samples in splits.items()}),
        prompts=dict(trained_subjects=ids["t"], held_out_subjects=ids["h"],
                     ids="t-... trained, h-... held out; the phrasing of a t- prompt need not have been trained on"),
        training=dict(**result, seed=args.seed, lr=args.lr, dropout=args.dropout, rows=args.rows, row_length=args.row_length,
                      hardware=torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()),
        export_logit_difference=difference,
        versions=dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__,
                      tokenizers=tokenizers.__version__)))
    size = sum(path.stat().st_size for path in args.output_dir.iterdir() if path.is_file())
    if size > MAX_BYTES:
        raise SystemExit(f"make_tiny_kimi: {args.output_dir} holds {size:,} bytes, more than {MAX_BYTES:,}.")
    log(f"held-out loss {loss} | {size:,} bytes | done: {args.output_dir}")


if __name__ == "__main__":
    main()
