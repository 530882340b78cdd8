"""Names and metadata for Orbax's readers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import array, path, tree_of
from everstep.runtime.checkpoint.orbax import array_names, layout, orbax_keys
from everstep.runtime.errors import StateRefused
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec


def leaf(*keys: Key) -> Leaf:
    return Leaf(path=keys, kind=LeafKind.ARRAY, dtype="float32", shape=(2,))


def d(name: str) -> Key:
    return Key(KeyKind.DICT, name)


def test_ordinary_names_are_joined_with_dots() -> None:
    tree = tree_of(
        array("params", "layers", 0, "kernel"), leaf(d("opt"), Key(KeyKind.ATTRIBUTE, "mu"))
    )
    assert array_names(tree) == ("params.layers.0.kernel", "opt.mu")


@pytest.mark.parametrize(
    "paths",
    [
        [(d("a"), d("b")), (d("a.b"),)],
        [(Key(KeyKind.DICT_INT, "0"),), (d("0"),)],
        [(Key(KeyKind.DICT_INT, "0"), d("x")), (d("0"), d("y"))],
        [(d("a/b"),), (d("a"), d("b"))],
        [(d(""),), (d("."),), (d(".."),), (d(""), d(""))],
        [(d("a"), d("b")), (d("a.b"),), (d("a%2Eb"),)],
        [(d("é"),), (d("e\u0301"),), (d("É"),)],
        [(d("0~dict-int"),), (Key(KeyKind.DICT_INT, "0"),), (d("0"),)],
    ],
)
def test_no_two_leaves_ever_meet(paths: list[tuple[Key, ...]]) -> None:
    tree = tree_of(*(leaf(*keys) for keys in paths))
    names = array_names(tree)
    assert len(set(names)) == len(paths)
    keys = orbax_keys(tree)
    assert len(set(keys)) == len(paths)
    # The plainest of them keeps its name.
    assert names[0] == ".".join(key.name for key in paths[0]) or paths[0][0] != d("a")


_KEYS = st.builds(
    Key,
    st.sampled_from(KeyKind),
    st.text(alphabet="a.b%~/0", max_size=3),
)


@given(st.lists(st.lists(_KEYS, min_size=1, max_size=3).map(tuple), unique=True, max_size=8))
def test_names_are_injective_for_any_paths(paths: list[tuple[Key, ...]]) -> None:
    tree = tree_of(*(leaf(*keys) for keys in paths))
    names = array_names(tree)
    assert len(set(names)) == len(paths)


def test_a_key_that_is_no_text_is_refused_by_leaf() -> None:
    with pytest.raises(StateRefused) as caught:
        array_names(tree_of(leaf(d("ok")), leaf(d("\ud800"))))
    assert "ud800" in caught.value.field


def test_metadata_says_what_orbax_expects() -> None:
    tree = TreeSpec(
        leaves=(
            array("w", shape=(2, 3)),
            Leaf(path=path("key"), kind=LeafKind.PRNG_KEY, dtype="uint32", shape=(2,), impl="rbg"),
            Leaf(path=path("i"), kind=LeafKind.SCALAR, dtype="int", value="5"),
            Leaf(path=path("big"), kind=LeafKind.SCALAR, dtype="int", value=str(2**70)),
            Leaf(path=path("s"), kind=LeafKind.SCALAR, dtype="str", value="'h\\xe9'"),
            Leaf(path=path("n"), kind=LeafKind.NONE),
            Leaf(path=path("e"), kind=LeafKind.EMPTY),
            Leaf(path=path("seq", 0), kind=LeafKind.EMPTY, value="tuple"),
        )
    )
    made = layout(tree, {0: (2, 3), 1: (2,)})
    metadata = json.loads(made.files["_METADATA"])
    types = {
        name: (entry["value_metadata"]["value_type"], entry["value_metadata"]["skip_deserialize"])
        for name, entry in metadata["tree_metadata"].items()
    }
    assert types == {
        "('w',)": ("np.ndarray", False),
        "('key',)": ("np.ndarray", False),
        "('i',)": ("scalar", False),
        "('big',)": ("string", False),
        "('s',)": ("string", False),
        "('n',)": ("None", True),
        "('e',)": ("Dict", True),
        "('seq', '0')": ("Tuple", True),
    }
    assert json.loads(made.files["_strings.json"]) == {"big": str(2**70), "s": "hé"}
    arrays = json.loads(made.files["array_metadatas/process_0"])["array_metadatas"]
    assert [a["array_metadata"]["ext_metadata"] for a in arrays] == [
        None,
        {"random_key_impl": "rbg"},
    ]
    assert [(s.name, s.dtype, s.value) for s in made.scalars] == [("i", "int64", 5)]
    sequence = metadata["tree_metadata"]["('seq', '0')"]["key_metadata"]
    assert [key["key_type"] for key in sequence] == [2, 1]
