"""What one instruction of a warp touches: sectors and lines of memory, banks of shared memory.

    where = addresses("2 * lane + 1")    # the byte address of each lane
    sectors(where)                       # (0, 1, 2, 3, 4, 5, 6, 7)
    efficiency(where)                    # 0.5: half of the bytes that come are wanted

A GPU moves whole sectors of 32 bytes; four of them share a tag in a cache, a line of 128 bytes.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Sequence

WARP = 32
SECTOR_BYTES, LINE_BYTES = 32, 128
BANKS, BANK_BYTES = 32, 4
LONGEST_TEXT = 200
LIMIT = 1 << 60  # of every intermediate value, and of addresses

Addresses = Sequence[int | None]

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS = {"min": min, "max": max, "abs": abs}


def addresses(
    pattern: str | Callable[[int], int | None] | Iterable[int | None],
    *,
    lanes: int = WARP,
    element_bytes: int = 4,
    offset_bytes: int = 0,
) -> tuple[int | None, ...]:
    """The byte address of each lane's element; None for a lane that takes no part.

    pattern: the element's index, as a text in `lane` ("32 * (lane % 4)", "lane ^ 1",
    "lane if lane < 16 else None"), a function of the lane, or one index for each lane.
    offset_bytes: the address of element 0.

    ValueError for a text that is not such an expression, an index that is no whole number, an
    address below 0, sizes that a lane cannot load.
    """
    _check_element(element_bytes)
    if not isinstance(offset_bytes, int):
        raise ValueError(f"offset_bytes must be a whole number, not {offset_bytes!r}")
    if not 1 <= lanes <= WARP:
        raise ValueError(f"a warp has 1 to {WARP} lanes that take part, not {lanes}")
    if isinstance(pattern, str):
        name, index_of = repr(pattern), _compiled(pattern)
        indices = [index_of(lane) for lane in range(lanes)]
    elif callable(pattern):
        name = getattr(pattern, "__name__", "the pattern")
        indices = [pattern(lane) for lane in range(lanes)]
    else:
        name, indices = "the pattern", list(pattern)
        if len(indices) != lanes:
            raise ValueError(f"one index for each of {lanes} lanes, please, not {len(indices)}")
    return tuple(
        None if index is None else _address(name, lane, index, element_bytes, offset_bytes)
        for lane, index in enumerate(indices)
    )


def sections(addresses: Addresses, section_bytes: int, element_bytes: int = 4) -> tuple[int, ...]:
    """The sections of `section_bytes` that are touched, numbered from address 0, sorted.

    An element that lies across a border touches the sections on both sides.
    """
    if section_bytes < 1:
        raise ValueError(f"a section has at least one byte, not {section_bytes}")
    return tuple(sorted(set().union(*_touched(addresses, section_bytes, element_bytes))))


def sectors(addresses: Addresses, element_bytes: int = 4) -> tuple[int, ...]:
    """The sectors of 32 bytes that are touched: what memory and L2 have to deliver."""
    return sections(addresses, SECTOR_BYTES, element_bytes)


def lines(addresses: Addresses, element_bytes: int = 4) -> tuple[int, ...]:
    """The lines of 128 bytes that are touched: the tags that L1 has to look up."""
    return sections(addresses, LINE_BYTES, element_bytes)


def bytes_used(addresses: Addresses, element_bytes: int = 4) -> int:
    """The distinct bytes that the lanes ask for."""
    return len(sections(addresses, 1, element_bytes))


def efficiency(
    addresses: Addresses, element_bytes: int = 4, section_bytes: int = SECTOR_BYTES
) -> float:
    """The share of the bytes in the touched sections that a lane asks for; 0 if none does."""
    fetched_bytes = len(sections(addresses, section_bytes, element_bytes)) * section_bytes
    return bytes_used(addresses, element_bytes) / fetched_bytes if fetched_bytes else 0.0


def bank_conflicts(addresses: Addresses, element_bytes: int = 4) -> int:
    """Passes beyond the first that these addresses cost in shared memory.

    Each of 32 banks gives one word of 4 bytes a pass, to any number of lanes. Elements of 8 bytes
    are served to half a warp at a time, of 16 to a quarter: those turns are no conflicts.
    """
    words = tuple(_touched(addresses, BANK_BYTES, element_bytes))
    together = WARP * BANK_BYTES // max(BANK_BYTES, element_bytes)
    extra = 0
    for first in range(0, len(words), together):
        wanted = set().union(*words[first : first + together])
        passes = [0] * BANKS
        for word in wanted:
            passes[word % BANKS] += 1
        extra += max(0, max(passes) - 1)
    return extra


def _touched(addresses: Addresses, section_bytes: int, element_bytes: int) -> Iterable[range]:
    """The sections that each lane touches; an empty range for a lane that takes no part."""
    _check_element(element_bytes)
    for address in addresses:
        if address is None:
            yield range(0)
        else:
            last = address + element_bytes - 1
            yield range(address // section_bytes, last // section_bytes + 1)


def _check_element(element_bytes: int) -> None:
    if element_bytes not in (1, 2, 4, 8, 16):
        raise ValueError(f"a lane loads 1, 2, 4, 8 or 16 bytes at once, not {element_bytes}")


def _address(name: str, lane: int, index, element_bytes: int, offset_bytes: int) -> int:
    try:
        index = operator.index(index)
    except TypeError:
        raise ValueError(
            f"{name} gives lane {lane} the index {index!r}: a whole number or None, please"
        ) from None
    address = offset_bytes + element_bytes * index
    if not 0 <= address < LIMIT:
        raise ValueError(f"{name} gives lane {lane} the address {address}: 0 to 2^60, please")
    return address


def _compiled(text: str) -> Callable[[int], int | None]:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"a pattern has at most {LONGEST_TEXT} characters, not {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError) as error:
        reason = getattr(error, "msg", None) or error
        raise ValueError(f"{text!r} is no expression in `lane`: {reason}") from None

    def index_of(lane: int) -> int | None:
        try:
            return _value(tree, lane)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ValueError(f"{text!r}, lane {lane}: {error}") from None

    return index_of


def _value(node: ast.expr, lane: int) -> int | None:
    """The value of an expression; ValueError for all that is not integer arithmetic on `lane`."""
    match node:
        case ast.Constant(value=int() | None as value):
            return _small(value)
        case ast.Name(id="lane"):
            return lane
        case ast.BinOp(left, ast.Div(), right):
            raise ValueError("indices are whole numbers: write // instead of /")
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            a, b = _value(left, lane), _value(right, lane)
            # Python's integers have no end: 9**9**9 would fill the memory.
            if isinstance(op, ast.Pow | ast.LShift | ast.RShift) and not 0 <= b <= 60:
                raise ValueError("powers and shifts are by 0 to 60")
            return _small(_BINARY[type(op)](a, b))
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, lane))
        case ast.BoolOp(op, values):
            for part in values:
                value = _value(part, lane)
                if bool(value) == isinstance(op, ast.Or):
                    break
            return value
        case ast.Compare(left, ops, others) if all(type(op) in _COMPARE for op in ops):
            values = [_value(part, lane) for part in (left, *others)]
            pairs = zip(ops, values[:-1], values[1:], strict=True)
            return all(_COMPARE[type(op)](a, b) for op, a, b in pairs)
        case ast.IfExp(test, then, otherwise):
            return _value(then if _value(test, lane) else otherwise, lane)
        case ast.Call(ast.Name(id), arguments, []) if id in _CALLS:
            return _CALLS[id](*(_value(argument, lane) for argument in arguments))
    raise ValueError(
        f"{ast.unparse(node)} is not understood: whole numbers, `lane`, None, operators, "
        "... if ... else ..., min, max and abs are"
    )


def _small(value: int | None) -> int | None:
    if value is not None and abs(value) > LIMIT:
        raise ValueError("numbers above 2^60 are no addresses")
    return value
