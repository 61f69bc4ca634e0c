"""Templates render as they do in transformers, and get no further than that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from server.oai.template import ChatTemplate, TemplateRefused
from server.oai.tokenizer import TextModel
from tests.tiny_models import with_tokenizer

SMOLLM = Path("models/HuggingFaceTB/SmolLM2-135M-Instruct")
Messages = list[dict[str, str]]
CHATS: dict[str, Messages] = {
    "one question": [{"role": "user", "content": "What is 2 + 2?"}],
    "a system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\nthere"},
    ],
    "turns": [
        {"role": "user", "content": "<b>&amp;</b> ' \" \\ {{ 1 }} {% x %}"},
        {"role": "assistant", "content": "So\u2028 \u20ac \U0001f600"},
        {"role": "user", "content": ""},
    ],
}
ODD = {
    "blocks on lines of their own": """
{%- for m in messages %}
    {% if m.role == 'user' %}
        {{ m['content'] }}
    {% endif %}
{% endfor %}
end""",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.role }}{% continue %}never{% endfor %}",
    "json without escapes": "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}[{{ pad_token }}]",
    "generation marks": "{% for m in messages %}{% generation %}{{ m.content }}\n"
    "{% endgeneration %}{% endfor %}",
    "a namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "nothing that is not given": "{{ tools }}|{{ documents }}|{{ add_generation_prompt }}|{{ x }}",
    "text tools": "{{ messages[0].content.strip().split('+')[0] | upper | trim }}"
    "{{ messages[0].content.startswith('W') }}{{ messages | length }}",
    "today": "{{ strftime_now('%Y') }}",
}


def model_folder(folder: Path, template: str | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    with_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bos_token": "A", **config}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def rendered(folder: Path, messages: Messages, **variables: Any) -> str:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template.render(messages, variables)


@pytest.mark.parametrize("chat", CHATS)
def test_smollm_chats_as_in_transformers(chat: str) -> None:
    if not SMOLLM.exists():
        pytest.skip("make model")
    theirs = AutoTokenizer.from_pretrained(SMOLLM)
    ours = TextModel.load(SMOLLM)
    assert ours is not None
    expected = theirs.apply_chat_template(
        CHATS[chat], add_generation_prompt=True, return_dict=False
    )
    assert ours.encode_chat(CHATS[chat], {}).tolist() == expected
    text = CHATS[chat][0]["content"] + "<|im_end|> é"
    assert ours.encode(text).tolist() == theirs.encode(text)
    assert set(theirs.all_special_ids) <= ours.special


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", ODD)
def test_odd_templates_render_as_in_transformers(name: str, chat: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", ODD[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(CHATS[chat], add_generation_prompt=True, tokenize=False)
    assert rendered(folder, CHATS[chat]) == expected


def test_variables_of_the_template_can_be_set(tmp_path: Path) -> None:
    source = "{{ enable_thinking }}{{ messages | length }}"
    folder = model_folder(tmp_path / "model", source)
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.render(CHATS["turns"], {"enable_thinking": False, "messages": []}) == "False3"


def test_where_a_template_is_found(tmp_path: Path) -> None:
    question = CHATS["one question"]
    assert ChatTemplate.load(model_folder(tmp_path / "none")) is None
    in_config = model_folder(tmp_path / "config", chat_template="config")
    assert rendered(in_config, question) == "config"
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    assert rendered(model_folder(tmp_path / "list", chat_template=several), question) == "default"
    both = model_folder(tmp_path / "both", "file", chat_template="config")
    assert rendered(both, question) == "file"
    token = {"bos_token": {"content": "<b>", "lstrip": False}}
    as_object = model_folder(tmp_path / "object", "{{ bos_token }}", **token)
    assert rendered(as_object, question) == "<b>"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[7].content.x }}", "messages"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|access"),
        ("{{ messages.__init__.__globals__ }}", "unsafe|access"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "__class__"),
        ("{{ namespace(__html__=1) }}", "__html__"),
        ("{{ range(1000000) | list }}", "[Rr]ange"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_a_template_cannot_do_everything(source: str, why: str) -> None:
    with pytest.raises(TemplateRefused, match=why):
        ChatTemplate(source, {}).render(CHATS["one question"])


def test_a_template_that_is_none_is_said_so(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "{% if %}")
    model = TextModel.load(folder)
    assert model is not None
    assert "cannot be compiled" in (model.no_chat or "")
    assert model.encode("ok").tolist() == [111, 107]
    without = TextModel.load(model_folder(tmp_path / "without"))
    assert without is not None
    assert without.no_chat == "has no chat template"
    (tmp_path / "empty").mkdir()
    assert TextModel.load(tmp_path / "empty") is None


def test_text_needs_no_torch() -> None:
    program = (
        "import sys, server.api.oai, server.oai.tokenizer;"
        "print(*{'torch', 'transformers'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert found.stdout.strip() == b""
