"""Both phases and a pruning in the trainers of Hugging Face and Lightning, stopped and resumed, on the digits."""

import pytest
import torch
from helpers.digits import digits, network
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from attncnn_plugin.pruning import prunable_heads
from attncnn_plugin.training import PruneHeads, TwoPhases

pytestmark = pytest.mark.slow
EPOCHS, SWITCH, PRUNE, KEEP = 8, 3, 6, 12  # epochs, those of the first phase, the epoch of pruning, heads
STEPS = 23  # of an epoch


@pytest.fixture(scope='module')
def data():
    data = digits()
    return Subset(data, range(1437)), Subset(data, range(1437, 1797))


def parts_of(batches):
    return TwoPhases(epoch=SWITCH), PruneHeads(epoch=PRUNE, keep=KEEP, batches=batches)


def accuracy(model, data):
    images, labels = next(iter(DataLoader(data, len(data))))
    with torch.no_grad():
        return (model.eval()(images).argmax(1) == labels).float().mean().item()


def assert_same(model, expected):
    assert model.state_dict().keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(model.state_dict()[name], value), name


def number_of_heads(model):
    return sum(layer.num_heads for layer in prunable_heads(model).values())


class Classifier(nn.Module):
    """As a model of Hugging Face: by names, and with its loss."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, pixel_values, labels=None):
        logits = self.network(pixel_values)
        return dict(logits=logits) if labels is None else dict(loss=cross_entropy(logits, labels), logits=logits)


def as_dict(samples):
    return dict(
        pixel_values=torch.stack([image for image, _ in samples]), labels=torch.stack([label for _, label in samples])
    )


def hugging_face(train, folder, epochs=EPOCHS, **settings):
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('accelerate')
    from attncnn_plugin.training.hugging_face import EpochCallback

    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=1e-2,
        weight_decay=0.05,
        lr_scheduler_type='constant',
        save_strategy='steps',
        save_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy='epoch',
        **settings,
    )
    trainer = transformers.Trainer(Classifier(), arguments, train_dataset=train, data_collator=as_dict)
    batches = [as_dict([train[i] for i in range(128)])]
    trainer.add_callback(EpochCallback(trainer, *parts_of(batches)))
    return trainer


@pytest.fixture(scope='module')
def whole_trainer(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp('trainer')
    trainer = hugging_face(data[0], folder)
    trainer.train()
    return trainer, folder


def test_trainer(whole_trainer, data):
    trainer, _ = whole_trainer
    assert trainer.model.network.phase == 'attn' and number_of_heads(trainer.model) == KEEP
    print('Trainer', accuracy(trainer.model.network, data[1]))
    assert accuracy(trainer.model.network, data[1]) > 0.9


@pytest.mark.parametrize('step', [60, 70, 80, 140, 150])
def test_trainer_resumes(step, whole_trainer, data, tmp_path):
    whole, folder = whole_trainer
    trainer = hugging_face(data[0], tmp_path)
    trainer.train(resume_from_checkpoint=str(folder / f'checkpoint-{step}'))
    assert_same(trainer.model, whole.model.state_dict())


def lightning(folder, library, *callbacks):
    save = library.callbacks.ModelCheckpoint(folder, '{epoch}', save_top_k=-1, save_on_train_epoch_end=True)
    return library.Trainer(
        default_root_dir=folder,
        max_epochs=EPOCHS,
        accelerator='cpu',
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[save, *callbacks],
    )


@pytest.fixture(scope='module', params=['lightning.pytorch', 'pytorch_lightning'])
def whole_lightning(request, data, tmp_path_factory):
    library = pytest.importorskip(request.param)
    from attncnn_plugin.training.lightning import EpochCallback

    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def forward(self, images):
            return self.network(images)

        def training_step(self, batch, index):
            return cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            decay = [p for p in self.parameters() if p.ndim > 1]
            others = [p for p in self.parameters() if p.ndim <= 1]
            optimizer = torch.optim.AdamW([dict(params=decay), dict(params=others, weight_decay=0)], lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / 10)]

    train, batches = data[0], [tuple(torch.utils.data.default_collate([data[0][i] for i in range(128)]))]

    def run(folder, path=None):
        module, averaging = Module(), library.callbacks.EMAWeightAveraging(decay=0.9)
        trainer = lightning(folder, library, averaging, EpochCallback(*parts_of(batches)))
        order = torch.utils.data.DistributedSampler(train, 1, 0)  # by the epoch
        trainer.fit(module, DataLoader(train, 64, sampler=order), ckpt_path=path)
        return module

    folder = tmp_path_factory.mktemp('lightning')
    return run, run(folder), folder


def test_lightning(whole_lightning, data):
    _, module, _ = whole_lightning
    assert module.network.phase == 'attn' and number_of_heads(module) == KEEP
    print('Lightning', accuracy(module, data[1]))
    assert accuracy(module, data[1]) > 0.9


@pytest.mark.parametrize('epoch', [SWITCH - 2, SWITCH - 1, SWITCH, PRUNE - 1, PRUNE])
def test_lightning_resumes(epoch, whole_lightning, tmp_path):
    run, module, folder = whole_lightning
    assert_same(run(tmp_path, folder / f'epoch={epoch}.ckpt'), module.state_dict())
