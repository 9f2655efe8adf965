"""Tensors over numpy memory, without TVM's compiler."""

from __future__ import annotations

import numpy as np
import pytest

from microserving.engine.tvm_runtime import array_of, constant, empty_array, tensor, tensor_of

SHAPES = [(), (1,), (3, 5), (0,), (0, 3), (4, 0, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "float16"])
def test_a_tensor_has_the_contents_of_the_array(shape: tuple[int, ...], dtype: str) -> None:
    array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    for made in (tensor(array), constant(array)):
        assert tuple(made.shape) == shape
        found = array_of(made)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("shape", SHAPES)
def test_fresh_memory_is_zero_and_aligned_whatever_came_before(shape: tuple[int, ...]) -> None:
    for _ in range(20):  # the allocator gives other addresses
        array = empty_array(shape, np.float32)
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        tensor_of(array)


def test_only_aligned_memory_is_shared() -> None:
    memory = empty_array((64,), np.uint8)
    shared, copied = constant(memory), constant(memory[1:])
    memory[:] = 7
    assert array_of(shared).tolist() == [7] * 64
    assert array_of(copied).tolist() == [0] * 63
    with pytest.raises(RuntimeError, match="aligned"):
        tensor_of(memory[1:])
