import pickle

import numpy as np
import pytest

from layerscope.errors import BadText, LayerscopeError
from layerscope.points import Moment
from layerscope.schedules import ALWAYS, Schedule, batches, epochs, every, first, steps, when


def taken(schedule, n=12):
    """The steps out of the first n that a schedule takes."""
    return [step for step in range(n) if schedule(Moment(step=step, batch=step))]


def late(moment):
    return moment.step >= 10


# What each word means ---------------------------------------------------------------------------


def test_every_starts_with_the_first_step():
    assert taken(every(5)) == [0, 5, 10]
    assert taken(every(1)) == list(range(12))


def test_every_with_an_offset_starts_there():
    assert taken(every(5, offset=2)) == [2, 7]
    assert taken(every(2, offset=7)) == [7, 9, 11]


def test_first_takes_that_many_steps():
    assert taken(first(3)) == [0, 1, 2]


def test_steps_takes_numbers_and_ranges():
    assert taken(steps(0, 10)) == [0, 10]
    assert taken(steps(range(2, 5), 9)) == [2, 3, 4, 9]
    assert taken(steps(range(0, 12, 4))) == [0, 4, 8]
    assert taken(steps(range(8, 0, -4))) == [4, 8]


def test_batches_looks_at_the_batch_and_not_at_the_step():
    assert batches(0, 2)(Moment(step=100, batch=2))
    assert not batches(0, 2)(Moment(step=2, batch=1))


def test_epochs_takes_epochs_by_number():
    assert [e for e in range(7) if epochs(1, 5)(Moment(epoch=e))] == [1, 5]
    assert epochs(0)(Moment(epoch=0))


def test_a_moment_without_an_epoch_is_in_no_epoch():
    assert not epochs(0)(Moment())
    assert not epochs(range(1000))(Moment())


def test_when_asks_the_function():
    assert taken(when(late)) == [10, 11]
    assert when(lambda moment: "yes")(Moment()) is True
    assert when(lambda moment: None)(Moment()) is False


def test_always_is_every_step():
    assert every(1) == ALWAYS
    assert taken(ALWAYS) == list(range(12))


def test_conditions_combine_like_the_words_they_are():
    assert taken(every(5) | first(3)) == [0, 1, 2, 5, 10]
    assert taken(every(5) & first(6)) == [0, 5]
    assert taken(~first(9)) == [9, 10, 11]
    assert taken(every(2) & ~every(4)) == [2, 6, 10]
    assert taken(first(1) | every(5) & when(late)) == [0, 10]


def test_numpy_numbers_are_numbers():
    assert every(np.int64(5)) == every(5)
    assert str(steps(np.int32(3))) == "steps(3)"


# Text form --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (every(100), "every(100)"),
        (every(100, offset=5), "every(100, offset=5)"),
        (first(3), "first(3)"),
        (epochs(1, 5), "epochs(1, 5)"),
        (batches(0), "batches(0)"),
        (steps(range(10)), "steps(0:10)"),
        (steps(3, range(10, 20, 5)), "steps(3, 10:20:5)"),
        (steps(range(8, 0, -4)), "steps(4:12:4)"),
        (every(100) | first(3), "every(100) | first(3)"),
        (every(2) | first(3) & epochs(1), "every(2) | first(3) & epochs(1)"),
        ((every(2) | first(3)) & epochs(1), "(every(2) | first(3)) & epochs(1)"),
        (~every(2), "~every(2)"),
        (~(every(2) & first(3)), "~(every(2) & first(3))"),
        (~(every(2) | first(3)) | ~epochs(1), "~(every(2) | first(3)) | ~epochs(1)"),
        (every(2) | (first(3) | epochs(1)), "every(2) | first(3) | epochs(1)"),
        (every(2) & (first(3) & epochs(1)), "every(2) & first(3) & epochs(1)"),
    ],
)
def test_a_schedule_prints_as_it_was_written_and_reads_back(schedule, text):
    assert str(schedule) == text
    assert repr(schedule) == text
    assert Schedule.parse(text) == schedule


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("every(100)|first(3)", every(100) | first(3)),
        ("  every( 100 )\n|\tfirst(3) ", every(100) | first(3)),
        ("((every(2)))", every(2)),
        ("~~every(2)", every(2)),
        ("~ ~ ~first(1)", ~first(1)),
        ("every(2) & first(3) | epochs(1) & batches(0)", (every(2) & first(3)) | (epochs(1) & batches(0))),
        ("~every(2) & first(3)", (~every(2)) & first(3)),
        ("every(10,offset=1)", every(10, offset=1)),
        ("(" * 50 + "first(1)" + ")" * 50, first(1)),
    ],
)
def test_text_is_read_with_pythons_precedence_and_any_spacing(text, schedule):
    assert Schedule.parse(text) == schedule


def test_a_function_prints_as_its_name_and_reads_back_when_it_is_passed_in():
    schedule = every(10) & ~when(late)
    assert str(schedule) == "every(10) & ~when(late)"
    assert Schedule.parse(str(schedule), functions={"late": late}) == schedule


def test_a_function_has_no_text_form_and_the_error_says_how_to_give_it():
    with pytest.raises(BadText, match=r"needs the function 'late', which has no text form.*functions="):
        Schedule.parse("every(10) & when(late)")
    with pytest.raises(BadText, match="there are early, other"):
        Schedule.parse("when(late)", functions={"other": late, "early": late})


def test_functions_without_a_plain_name_print_as_something_that_reads_back():
    class Odd:
        def __call__(self, moment):
            return False

    def renamed(moment):
        return False

    renamed.__name__ = "not (a) name"
    anonymous = lambda moment: False  # noqa: E731
    for function, text in [(anonymous, "when(<lambda>)"), (Odd(), "when(Odd)"), (renamed, "when(not_a_name)")]:
        schedule = when(function)
        assert str(schedule) == text
        assert Schedule.parse(text, functions={text[5:-1]: function}) == schedule
    assert str(when(anonymous, name="loss_is_high")) == "when(loss_is_high)"
    with pytest.raises(BadText, match="cannot stand in when"):
        when(anonymous, name="a b")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected a condition (at the end)"),
        ("   ", "expected a condition (at the end)"),
        ("evry(3)", "expected a condition (at column 1, 'evry')"),
        ("every(3) first(2)", "expected & or | or the end (at column 10, 'first')"),
        ("every(3) and first(2)", "expected & or | or the end (at column 10, 'and')"),
        ("every(3) |", "expected a condition (at the end)"),
        ("| every(3)", "expected a condition (at column 1, '|')"),
        ("(every(3)", "expected ) (at the end)"),
        ("every(3))", "expected & or | or the end (at column 9, ')')"),
        ("every 3", "expected ( (at column 7, '3')"),
        ("every()", "every takes one number"),
        ("every(1, 2)", "every takes one number"),
        ("every(1:2)", "every takes one number"),
        ("first(1, 2)", "first takes one number"),
        ("first(1, offset=2)", "expected a number (at column 10, 'offset')"),
        ("every(1, offset=2, offset=3)", "offset= comes last"),
        ("first(x)", "expected a number (at column 7, 'x')"),
        ("first(1.5)", "expected , (at column 8, '.')"),
        ("first(3,)", "expected a number (at column 9, ')')"),
        ("steps(0:)", "expected a number (at column 9, ')')"),
        ("steps(0:9:0)", "the step of a range is at least 1"),
        ("when()", "expected (name) after when"),
        ("when", "expected (name) after when"),
        ("$", "expected a condition (at column 1, '$')"),
        ("__import__('os')", "expected a condition (at column 1, '__import__')"),
        (f"first({'9' * 5000})", "numbers end at"),
        ("(" * 5000, "parentheses deep"),
    ],
)
def test_what_is_not_a_schedule_is_refused_with_the_place_and_what_is_allowed(text, why):
    with pytest.raises(BadText) as caught:
        Schedule.parse(text)
    message = str(caught.value)
    assert why in message
    assert "every(n), every(n, offset=k), first(n)" in message
    assert len(message) < 700


# Bad arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: every(0), "every(n) takes numbers from 1"),
        (lambda: every(-5), "not -5"),
        (lambda: every(2.0), "whole numbers, not 2.0"),
        (lambda: every("2"), "whole numbers, not '2'"),
        (lambda: every(True), "whole numbers, not True"),
        (lambda: every(2, offset=-1), "offset=...) takes numbers from 0"),
        (lambda: first(0), "first(n) takes numbers from 1"),
        (lambda: first(None), "whole numbers, not None"),
        (lambda: first(2**63), "2**63 - 1"),
        (lambda: steps(), "steps() names none"),
        (lambda: steps(-1), "from 0"),
        (lambda: steps([0, 1]), "put a star before the list"),
        (lambda: epochs(1.5), "epochs(...) takes whole numbers"),
        (lambda: batches(range(5, 5)), "empty range"),
        (lambda: batches(range(-2, 5)), "from 0"),
        (lambda: when("late"), "takes a function of a moment, not 'late'"),
        (lambda: Schedule.parse("every(0)"), "from 1"),
        (lambda: Schedule.parse("steps(-3)"), "from 0"),
        (lambda: Schedule.parse("steps(9:3)"), "empty range"),
        (lambda: Schedule.parse(100), "a schedule is text"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(make, why):
    with pytest.raises(BadText) as caught:
        make()
    assert why in str(caught.value)
    assert isinstance(caught.value, LayerscopeError)
    assert isinstance(caught.value, ValueError)


def test_and_or_not_are_refused_because_they_would_quietly_drop_a_schedule():
    for join in (lambda: every(2) or first(3), lambda: every(2) and first(3), lambda: not every(2)):
        with pytest.raises(TypeError, match=r"join schedules with & \| ~"):
            join()


def test_only_schedules_join_schedules():
    with pytest.raises(TypeError, match="unsupported operand"):
        every(2) | 3
    with pytest.raises(TypeError, match="unsupported operand"):
        late & every(2)


# Values -----------------------------------------------------------------------------------------


def test_schedules_are_values():
    assert every(2) | first(3) == every(2) | first(3)
    assert every(2) != every(3)
    assert every(2) | first(3) != every(2) & first(3)
    assert steps(1) != batches(1)
    assert len({every(2), every(2), ~every(2), when(late), when(late)}) == 3
    with pytest.raises(AttributeError):
        every(2).n = 3
    schedule = (every(2) | steps(range(3), 9)) & ~when(late)
    assert pickle.loads(pickle.dumps(every(2) | steps(range(3), 9))) == every(2) | steps(range(3), 9)
    assert schedule == (every(2) | steps(range(3), 9)) & ~when(late)


def test_not_not_is_nothing():
    assert ~~every(2) == every(2)
