import resource

import pytest

from agent.engine.template import TEXT_CHARACTERS, ChatTemplate
from agent.engine.types import ChatTemplateError, ModelFileError

HI = ({"role": "user", "content": "hi"},)


def refusal(source, messages=HI):
    template = ChatTemplate(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError) as caught:
        template.render(messages)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10
    return str(caught.value)


LOOP = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 3000000000 }}",
        "{{ 3000000000 * 'a' }}",
        "{{ ['a'] * 300000000 }}",
        "{{ (['a' * 100000] * 100000)|join }}",
        "{{ ''.join(['a' * 100000] * 100000) }}",
        "{{ ('x' * 1000)|join('y' * 100000) }}",
        "{{ ('x' * 1000).join(['y'] * 100000) }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
        "{{ ('a\n' * 100000)|indent(60000) }}",
        "{{ 'a'|indent('b' * 1000000, true) }}{{ 'a\na\na'|indent('b' * 1000000) }}",
        "{{ '%4000000000d' % 1 }}",
        "{{ '%*d' % (4000000000, 1) }}",
        "{{ ('%(a)s' * 10000) % {'a': 'a' * 100000} }}",
        "{{ '{:4000000000}'.format(1) }}",
        "{{ ('{0}' * 10000).format('a' * 100000) }}",
        "{{ 'a'.center(4000000000) }}",
        "{{ 'a'.zfill(4000000000) }}",
        "{{ (1).to_bytes(4000000000, 'big') }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 1.5|round(4000000000) }}",
        "{{ [['a' * 100000] * 100000] }}",
        "{{ [['a' * 100000] * 100000]|string }}",
        "{{ [['a' * 100000] * 100000]|tojson }}",
        "{{ [['a' * 100000] * 100000]|tojson(indent=2) }}",
        "{{ [['a' * 100000] * 100000]|upper }}",
        "{{ [['a'] * 100000] * 10000 ~ '' }}",
        "{{ ([['a' * 100000]] * 100000)|sum(start=[]) }}",
        "{{ (['a' * 1000000] * 100000)|map('list')|list }}",
        "{{ strftime_now('%c' * 1000000) }}",
        "{{ strftime_now('%9999999Y') }}",
        LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        LOOP + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        LOOP + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        LOOP + "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}{% endfor %}",
        LOOP + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
        + LOOP
        + "{% set ns.x = f(ns.x) %}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    ],
)
def test_a_template_that_wants_too_much_memory_is_refused(source):
    assert refusal(source).startswith("the chat template refused the messages: ")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
        "{% for i in range(9) recursive %}{{ loop(range(9)) if loop.depth < 20 }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_never_ends_is_refused(source):
    assert refusal(source).startswith("the chat template refused the messages: ")


def test_endless_recursion_is_refused():
    assert "RecursionError" in refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


def test_half_a_surrogate_pair_is_refused():
    assert "UnicodeEncodeError" in refusal("{{ '\\ud800' }}")


@pytest.mark.parametrize("name", ["center", "format", "wordwrap", "batch", "slice", "xmlattr"])
def test_a_filter_no_chat_needs_is_not_there(name):
    with pytest.raises(ModelFileError, match=name):
        ChatTemplate("{{ 'a'|" + name + " }}")


@pytest.mark.parametrize("name", ["lipsum", "cycler", "joiner"])
def test_a_global_no_chat_needs_is_not_there(name):
    assert "Undefined" in refusal("{{ " + name + "(n=5) }}")


def test_a_template_nested_too_deeply_is_a_model_file_error():
    with pytest.raises(ModelFileError, match="nested too deeply"):
        ChatTemplate("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}")
    with pytest.raises(ModelFileError, match="nested too deeply"):
        ChatTemplate("{% for i in x %}" * 30 + "{% endfor %}" * 30)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages|length }}", "1"),
        ("{% for m in messages if m.role == 'user' %}{{ loop.last }}{{ m.content }}{% endfor %}",
         "Truehi"),
        ("{{ messages[0].content|trim ~ '!' + 'a' * 3 }}", "hi!aaa"),
        ("{{ messages|tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'a': [1]}|tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("{{ '%s-%d' % ('a', 7) }} {{ '{}{}'.format(1, 'b') }}", "a-7 1b"),
        ("{{ 'a b'.split(' ')|map('upper')|join('.') }}", "A.B"),
        ("{{ 'abab'|replace('a', 'c') }}{{ 'ab'.replace('b', 'd') }}", "cbcbad"),
        ("{{ '-'.join(['a', 'b']) }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}", "a-b10243[1, 2]"),
        ("{{ 'a\nb'|indent(2) }}{{ [3, 1]|sort|list }}{{ [1, 2]|sum }}", "a\n  b[1, 3]3"),
        ("{% set n = namespace(x=0) %}{% for i in [1, 2] %}{% set n.x = i %}{% endfor %}{{ n.x }}",
         "2"),
        ("{% for i in range(3) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') }}{{ missing }}{{ none }}", "[a]None"),
        ("{{ messages[0].get('name', 'x') }}{{ strftime_now('%Y')|length }}", "x4"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
    ],
)  # fmt: skip
def test_what_chat_templates_do_works(source, text):
    assert ChatTemplate(source).render(HI) == text


def test_a_long_conversation_may_be_long():
    long = ({"role": "user", "content": "é" * TEXT_CHARACTERS},) * 8
    template = ChatTemplate("{% for m in messages %}{{ '<' + m.content|trim + '>' }}{% endfor %}")
    assert len(template.render(long)) == 8 * (TEXT_CHARACTERS + 2)


def test_many_messages_may_be_many():
    many = ({"role": "user", "content": ""},) * 16384
    source = "{% for m in messages %}{% if messages|length > loop.index %},{% endif %}{% endfor %}"
    assert len(ChatTemplate(source).render(many)) == 16383


def test_one_refusal_leaves_the_next_rendering_its_budget():
    template = ChatTemplate("{{ messages[0].content * 2000000 }}")
    for _ in range(3):
        with pytest.raises(ChatTemplateError, match="too much text"):
            template.render(HI)
        assert template.render(({"content": ""},)) == ""
