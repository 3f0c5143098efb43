import pytest

from agent.engine.threads import SPIN_COUNT, shorten_spin


def test_the_spin_is_shortened():
    environ = {"PATH": "/bin"}
    shorten_spin(environ)
    assert environ == {"PATH": "/bin", "GOMP_SPINCOUNT": str(SPIN_COUNT)}


@pytest.mark.parametrize(
    "chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": ""}]
)
def test_the_operator_s_choice_stands(chosen):
    environ = dict(chosen)
    shorten_spin(environ)
    assert environ == chosen
