"""What a reader sees of an exercise."""

from helpers.check import check_exercise


def verdict(capsys, exercise: str, *answers) -> str:
    """The line that is printed, without its head; the checker's result must agree with it."""
    result = check_exercise(exercise, *answers)
    head, said = capsys.readouterr().out.strip().split(": ", 1)
    assert head == f"Exercise {exercise}"
    expected = ("correct", "it cannot be checked") if result else "not yet"
    assert said.startswith("not attempted" if result is None else expected), said
    return said
