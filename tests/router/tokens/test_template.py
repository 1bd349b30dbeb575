"""Chat templates, as Hugging Face's tokenizers render them."""

from __future__ import annotations

import pytest

from kvhearth.router.tokens.template import Template

SAID = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I am  "}]


def _render(source: str, *, continued: bool = False, **options: object) -> str:
    template = Template(source, {"bos_token": "<s>"})
    return template.render(SAID, None, options, add_generation_prompt=not continued, continued=continued)


@pytest.mark.parametrize(
    ("loop", "takes_parts"),
    [
        ("{% for p in message.content %}{% endfor %}", True),
        ("{% for p in message['content'] | selectattr('type') %}{% endfor %}", True),
        ("{% for p in message.content[1:] %}{% endfor %}", True),
        ("{% set content = message.content %}{% for p in content %}{% endfor %}", True),
        ("{{ message.content }}", False),
        ("{% for p in message.parts %}{% endfor %}", False),
    ],
)
def test_templates_that_go_through_parts_are_known(loop: str, takes_parts: bool) -> None:
    assert Template("{% for message in messages %}" + loop + "{% endfor %}", {}).takes_parts is takes_parts


def test_variables_of_the_client_reach_the_template_but_its_messages_do_not_change() -> None:
    assert _render("{{ bos_token }}{{ x }}{{ messages | length }}", x=7, messages=[]) == "<s>72"


def test_what_marks_an_answer_for_training_is_what_it_holds() -> None:
    assert _render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hello!"


def test_objects_are_printed_as_they_are() -> None:
    assert _render("{{ x | tojson }}", x={"b": "東", "a": "<"}) == '{"b": "東", "a": "<"}'


def test_loops_can_be_left() -> None:
    assert _render("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "user"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<hello><I am  "),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<hello><I am"),
    ],
)
def test_a_message_that_goes_on_ends_where_its_text_ends(source: str, text: str) -> None:
    assert _render(source, continued=True) == text


def test_a_template_that_drops_the_end_cannot_go_on() -> None:
    with pytest.raises(ValueError, match="drops the end"):
        _render("{{ messages[0].content }}", continued=True)


@pytest.mark.parametrize(
    "source", ["{{ 1 // 0 }}", "{{ messages.append(1) }}", "{{ x.y.z }}", "{{ raise_exception('no') }}"]
)
def test_whatever_a_template_does_is_a_refusal(source: str) -> None:
    with pytest.raises(ValueError, match="refuses this conversation"):
        _render(source)
