"""Every word is documented with an example that compiles, and refuses to run outside a kernel."""

import textwrap

import pytest
from tests.frontend.helpers import build, own
from tests.frontend.test_syntax import compiled

import peertile.language as T
from peertile.dtypes import DType, f32, i32, i64
from peertile.errors import CompileError, UsageError
from peertile.frontend.registry import implementation
from peertile.ir.types import Access
from peertile.language.annotations import REQUIRED, KernelParam, Role, read_signature
from peertile.language.word import KernelOnly, word_of

PARAMS = "z, x, y, m, p, v, vw, mptr, words, s, c, b, box, ptr, n, h"
PRELUDE = """
N = 64
t = x.load((0,), (64,))
a = m.load((0, 0), (16, 64))
"""


def documented():
    """(name, object) of every word, method and property of the language."""
    for namespace, prefix in ((T, ""), (T.unsafe, "unsafe.")):
        for name in namespace.__all__:
            obj = getattr(namespace, name)
            yield prefix + name, obj
            if isinstance(obj, type) and issubclass(obj, KernelOnly):
                for cls in obj.__mro__[:-1]:
                    for member, value in vars(cls).items():
                        target = value.fget if isinstance(value, property) else value
                        if word_of(target) is not None:
                            yield f"{name}.{member}", target


ALL = dict(documented())
WORDS = {name: obj for name, obj in ALL.items() if word_of(obj) is not None}
EXAMPLES = {
    name: textwrap.dedent(obj.__doc__.split("Example::")[1])
    for name, obj in ALL.items()
    if "Example::" in (obj.__doc__ or "")
}


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_name_has_a_docstring(name):
    assert len((ALL[name].__doc__ or "").strip()) > 20


@pytest.mark.parametrize("name", sorted(WORDS))
def test_every_word_has_an_example(name):
    assert name in EXAMPLES


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_compiles(name):
    example = EXAMPLES[name]
    # Each tier of its own: pointers only where the example is about them.
    given = {} if "tiles()" not in example else {"z": own(f32, (64,), persistent=True)}
    build(compiled(PRELUDE + example, PARAMS), unsafe=True, **given)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_every_word_has_a_meaning(name):
    assert callable(implementation(word_of(WORDS[name])))


@pytest.mark.parametrize("name", sorted(WORDS))
def test_a_word_called_outside_a_kernel_says_so(name):
    with pytest.raises(UsageError) as caught:
        WORDS[name]()
    assert str(caught.value) == (
        f"T.{word_of(WORDS[name]).name}: expected a call inside a kernel, got one from the host; it is a word of the "
        "kernel language, so write it in a function marked @pt.kernel, or in a helper it calls"
    )


def test_a_parameter_type_cannot_be_made_on_the_host():
    with pytest.raises(UsageError) as caught:
        T.Mailbox()
    assert str(caught.value) == (
        "T.Mailbox: expected an annotation of a kernel parameter, got a call; the host passes tensors, partitions and "
        "communication objects, and the kernel sees them as this type"
    )


def test_all_names_exist_once_and_are_sorted():
    assert len(set(T.__all__)) == len(T.__all__)
    assert all(hasattr(T, name) for name in T.__all__)


# ---------------------------------------------------------------- signatures of kernels


def test_a_signature_is_read():
    def kernel(
        z: T.Exclusive,
        x: T.Shared,
        p: T.Peer,
        q: T.Peer[T.read],
        v: T.Multicast,
        s: T.Signal,
        c: T.Counter,
        b: T.Barrier,
        box: T.Mailbox,
        n: T.i32,
        k: float,
        M: T.Const,
        N: T.Const[int] = 64,
    ):
        pass

    assert read_signature(kernel) == (
        KernelParam("z", Role.EXCLUSIVE),
        KernelParam("x", Role.SHARED),
        KernelParam("p", Role.PEER, access=Access.READ_WRITE),
        KernelParam("q", Role.PEER, access=Access.READ),
        KernelParam("v", Role.MULTICAST),
        KernelParam("s", Role.SIGNAL),
        KernelParam("c", Role.COUNTER),
        KernelParam("b", Role.BARRIER),
        KernelParam("box", Role.MAILBOX),
        KernelParam("n", Role.SCALAR, dtype=i32),
        KernelParam("k", Role.SCALAR, dtype=f32),
        KernelParam("M", Role.CONST),
        KernelParam("N", Role.CONST, 64, const_type=int),
    )


def test_annotations_may_be_text():
    width = i64

    def kernel(z: "T.Exclusive", n: "width", N: "T.Const[int]" = 3):
        return width

    assert [p.role for p in read_signature(kernel)] == [Role.EXCLUSIVE, Role.SCALAR, Role.CONST]


TYPES = (
    "T.Exclusive, T.Accumulate, T.Shared, T.Peer, T.Multicast, T.Signal, T.Counter, T.Barrier, T.Mailbox, "
    "T.Pointer, T.Const[...], or a dtype such as T.i32 for a scalar"
)


def signature_error(fn) -> str:
    with pytest.raises(CompileError) as caught:
        read_signature(fn)
    return caught.value.message


def test_a_missing_annotation_is_refused():
    def kernel(z):
        pass

    assert signature_error(kernel) == f"parameter `z`: expected {TYPES}, got no annotation"


def test_a_foreign_annotation_is_refused():
    def kernel(z: list):
        pass

    assert signature_error(kernel) == f"parameter `z`: expected {TYPES}, got <class 'list'>"


def test_an_annotation_that_means_nothing_is_refused():
    def kernel(z: "T.Exclusiv"):
        pass

    assert signature_error(kernel) == (
        "parameter `z`: annotation 'T.Exclusiv' cannot be evaluated (module 'peertile.language' has no attribute "
        "'Exclusiv'); use names that the kernel's module defines"
    )


def test_star_parameters_are_refused():
    def kernel(*args: T.Shared):
        pass

    assert signature_error(kernel) == "kernel `kernel`: expected named parameters only, got *args or **kwargs"


def test_a_default_of_a_tensor_is_refused():
    def kernel(x: T.Shared = None):
        pass

    assert signature_error(kernel) == ("parameter `x`: only scalars and constants have defaults, got None for T.Shared")


def test_a_pointer_needs_an_unsafe_kernel():
    def kernel(x: T.Pointer):
        pass

    assert signature_error(kernel) == (
        "parameter `x`: T.Pointer is a raw address, which only unsafe kernels take; mark the kernel "
        "@pt.kernel(unsafe=True), or take T.Shared, T.Exclusive or T.Peer"
    )
    assert read_signature(kernel, unsafe=True) == (KernelParam("x", Role.POINTER),)


def test_peer_access_is_read_or_nothing():
    with pytest.raises(UsageError) as caught:
        T.Peer["read"]
    assert str(caught.value) == "T.Peer[...]: expected T.read, got 'read'; T.Peer alone reads and writes"


def test_required_parameters_say_so():
    assert KernelParam("z", Role.SHARED).required
    assert not KernelParam("n", Role.CONST, 3).required
    assert KernelParam("z", Role.SHARED).default is REQUIRED
    assert isinstance(T.f32, DType)
