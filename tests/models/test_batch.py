import pytest
import torch

from fourfold.models import IGNORE, Microbatch


def test_documents_must_fill_their_rows():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    Microbatch(ids, ids, ids, ((5,), (2, 3)))
    for documents in (((5,),), ((5,), (2, 2)), ((5,), (5, 0)), ((5,), ())):
        with pytest.raises(AssertionError, match="documents"):
            Microbatch(ids, ids, ids, documents)


def test_tensors_must_have_one_shape():
    ids = torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(AssertionError, match="labels"):
        Microbatch(ids, ids[:, 1:], ids, ((5,),))


def test_to_moves_the_tensors_and_keeps_the_documents():
    ids = torch.zeros(1, 5, dtype=torch.int64)
    moved = Microbatch(ids, ids, ids, ((2, 3),)).to("meta")
    assert {
        moved.input_ids_BS.device.type,
        moved.labels_BS.device.type,
        moved.position_ids_BS.device.type,
    } == {"meta"}
    assert moved.documents == ((2, 3),)


def test_ignored_label_is_that_of_the_ecosystem():
    assert IGNORE == torch.nn.CrossEntropyLoss().ignore_index == -100
