"""Networks of Hugging Face, diffusers and torchvision that look at small images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel, UNet2DModel
from torch import Tensor, nn
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    ResNetConfig,
    ViTConfig,
    ViTModel,
)

from tests.parity.architectures import Images

__all__ = ["DETR", "ConditionedUNet", "RetinaNet", "TorchvisionResNet", "UNet", "ViT"]


class OfImages(Images):
    """Learns from images alone: what to learn is made of the image itself."""

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(*batch)
        self.notes.append(loss.item())
        self.log("validation_loss", loss, sync_dist=True)


class ViT(OfImages):
    """Fills in masked patches with the transpose of the convolution that reads them: one matrix in two shapes.

    Args:
        checkpointed: Whether layers are computed again in the backward pass.
        arguments: See :class:`~tests.support.models.Trained`.
    """

    def __init__(self, *, checkpointed: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        config = ViTConfig(
            image_size=8,
            patch_size=4,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        self.network = ViTModel(config, add_pooling_layer=False, use_mask_token=True)
        if checkpointed:
            self.network.gradient_checkpointing_enable()

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        masked = torch.arange(4).remainder(2).bool().expand(len(images), 4)
        hidden = self.network(images, bool_masked_pos=masked).last_hidden_state[:, 1:]
        written = hidden @ self.network.embeddings.patch_embeddings.projection.weight.flatten(1)
        patches = F.unfold(images, 4, stride=4).transpose(1, 2)
        return F.l1_loss(written[masked], patches[masked])


class DETR(OfImages):
    """Finds one box in each image, with a residual network in front of a transformer; boxes are matched to queries."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        backbone = ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        )
        config = DetrConfig(
            backbone_config=backbone,
            num_queries=3,
            num_labels=2,
            d_model=16,
            encoder_layers=1,
            decoder_layers=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            auxiliary_loss=True,
        )
        self.network = DetrForObjectDetection(config)

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, 3, 32, 32, generator=generator)

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        boxes = [
            {"class_labels": (target[:1] > 0).long(), "boxes": torch.sigmoid(target[[0, 1, 2, 2]])[None]}
            for target in targets
        ]
        return self.network(pixel_values=images, labels=boxes).loss


class Diffusion(OfImages):
    """Learns the noise in an image; in validation, makes an image of noise."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.noises = DDPMScheduler(num_train_timesteps=20)

    def noise_in(self, images: Tensor, times: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        times = torch.randint(20, (len(images),))
        return F.mse_loss(self.noise_in(self.noises.add_noise(images, noise, times), times), noise)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        generator = torch.Generator().manual_seed(batch_idx)
        image = torch.randn(1, 3, 8, 8, generator=generator)
        self.noises.set_timesteps(3)
        for time in self.noises.timesteps:
            image = self.noises.step(self.noise_in(image, time[None]), time, image, generator=generator).prev_sample
        self.notes.append(image)


class UNet(Diffusion):
    """Blocks may be computed again in the backward pass.

    Args:
        checkpointed: Whether they are.
        arguments: See :class:`~tests.support.models.Trained`.
    """

    def __init__(self, *, checkpointed: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.network = UNet2DModel(
            sample_size=8,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=8,
        )
        if checkpointed:
            self.network.enable_gradient_checkpointing()

    def noise_in(self, images: Tensor, times: Tensor) -> Tensor:
        return self.network(images, times).sample


class ConditionedUNet(Diffusion):
    """Attends to what an image is of, or to nothing; the prompts are learned, too."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.network = UNet2DConditionModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=8,
            attention_head_dim=2,
        )
        self.prompts = nn.Parameter(torch.randn(4, 5, 8))

    def noise_in(self, images: Tensor, times: Tensor) -> Tensor:
        prompts = self.prompts[torch.arange(len(images)) % 4]
        return self.network(images, times, encoder_hidden_states=prompts).sample


class TorchvisionResNet(Images):
    """Its first two stages, which have most kinds of layers and few of the weights."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.network = _residual_network(outputs=3)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)


class RetinaNet(OfImages):
    """torchvision's; in validation it says what it found where, after suppressing what overlaps."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        from torchvision.models import detection

        network = _residual_network(outputs=3)
        backbone: Any = nn.Sequential(*list(network.children())[:-2], nn.Conv2d(128, 16, 1))
        backbone.out_channels = 16
        anchors = detection.anchor_utils.AnchorGenerator(sizes=((8, 16),), aspect_ratios=((0.5, 1.0),))
        self.network = detection.RetinaNet(
            backbone, num_classes=3, anchor_generator=anchors, min_size=32, max_size=32, detections_per_img=5
        )

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.rand(count, 3, 32, 32, generator=generator)

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        corners = [target[:2].sigmoid() * 16 for target in targets]
        boxes = [
            {"boxes": torch.cat([corner, corner + 10])[None], "labels": (target[:1] > 0).long()}
            for corner, target in zip(corners, targets, strict=True)
        ]
        return sum(self.network(list(images), boxes).values())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        found = self.network(list(batch[0]))
        self.notes.append(found)
        self.log("validation_loss", torch.stack([one["scores"].sum() for one in found]).sum(), sync_dist=True)


def _residual_network(outputs: int) -> Any:
    from torchvision.models.resnet import BasicBlock, ResNet

    network: Any = ResNet(BasicBlock, [1, 1, 1, 1])
    network.layer3 = network.layer4 = nn.Identity()
    network.fc = nn.Linear(128, outputs)
    return network
