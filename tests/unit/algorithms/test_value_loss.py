import torch

from alphaapollo.algorithms.value_loss import value_loss


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_value_loss_by_hand():
    # old 0, clip 0.5: V=1 is held at 0.5. Return 2: plain 1, clipped 2.25 wins. Return 0: plain 1 wins. V=0.2: inside.
    vpreds = row(1.0, 1.0, 0.2, float("nan")).requires_grad_()
    loss, clipped = value_loss(vpreds, row(0, 0, 0, 0), row(2.0, 0.0, 1.0, 0.0), row(1, 1, 1, 0), clip=0.5)
    torch.testing.assert_close(loss, row(1.125, 0.5, 0.32, 0.0))
    assert clipped.tolist() == [[True, False, False, False]]
    loss.sum().backward()
    torch.testing.assert_close(vpreds.grad, row(0.0, 1.0, -0.8, 0.0))
    loss, clipped = value_loss(row(3.0), row(0.0), row(1.0), row(1), clip=None)
    assert loss.item() == 2.0 and not clipped.any()
