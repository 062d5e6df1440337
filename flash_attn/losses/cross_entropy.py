"""Cross-entropy as a module (flash_attn.ops.triton.cross_entropy)."""

import torch

from ..ops.triton.cross_entropy import cross_entropy_loss

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(torch.nn.Module):
    """Cross-entropy that keeps one number a row for the backward, beside the logits.

    Arguments:
        ignore_index: a label whose row does not count.
        reduction: "mean" over the rows that count, "sum", or "none".
        label_smoothing, logit_scale, lse_square_scale, inplace_backward, process_group: see
            flash_attn.ops.triton.cross_entropy.cross_entropy_loss.
        return_z_loss: also return the z-loss, reduced alike, without gradient.

    Raises:
        NotImplementedError: reduction is something else.
    """

    def __init__(
        self,
        ignore_index=-100,
        reduction="mean",
        label_smoothing=0.0,
        logit_scale=1.0,
        lse_square_scale=0.0,
        inplace_backward=False,
        process_group=None,
        return_z_loss=False,
    ):
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(f'flash_attn: reduction is {reduction!r}; use "mean", "sum" or "none"')
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def _reduced(self, losses, target):
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total if self.reduction == "sum" else total / (target != self.ignore_index).sum()

    def forward(self, input, target, precomputed_lse=None):
        """Arguments:
            input: logits [rows, classes], any floating dtype.
            target: int64 or int32 [rows].
            precomputed_lse: None, or [rows]: see cross_entropy_loss.

        Returns:
            The loss, float32 (float64 for float64 logits): a scalar, or [rows] with reduction "none"; NaN for
            a mean over no rows. With return_z_loss (loss, z_loss).

        Raises:
            ValueError, RuntimeError: as cross_entropy_loss.
        """
        losses, z_losses = cross_entropy_loss(
            input,
            target,
            precomputed_lse=precomputed_lse,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            lse_square_scale=self.lse_square_scale,
            ignore_index=self.ignore_index,
            inplace_backward=self.inplace_backward,
            process_group=self.process_group,
        )
        loss = self._reduced(losses, target)
        return (loss, self._reduced(z_losses, target)) if self.return_z_loss else loss
