"""Both phases and a pruning in the trainers of Hugging Face and Lightning, stopped and resumed, on the digits."""

from types import SimpleNamespace

import pytest
import torch
from helpers.plain_digits import digits, network
from helpers.small import numbers
from helpers.versions import hugging_face_library, new_hugging_face
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, Subset

from attncnn_plugin.hugging_face import load_hugging_face
from attncnn_plugin.training import PruneHeads, TwoPhases

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


def hugging_face(train, folder, network=None, optimizers=(None, None), parts=None, **settings):
    transformers = hugging_face_library()
    pytest.importorskip('accelerate')
    from attncnn_plugin.training.hugging_face import EpochCallback

    recipe = dict(num_train_epochs=EPOCHS, learning_rate=1e-2, weight_decay=0.05, lr_scheduler_type='constant')
    sizes = dict(per_device_train_batch_size=64, per_device_eval_batch_size=512)
    files = dict(save_strategy='steps', save_steps=10, logging_strategy='epoch', report_to=[], disable_tqdm=True)
    settings = {**recipe, **sizes, **files, **settings}
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, **settings)
    data = dict(train_dataset=train, eval_dataset=train, data_collator=as_dict)
    trainer = transformers.Trainer(network or Classifier(), arguments, optimizers=optimizers, **data)
    batches = [as_dict([train[i] for i in range(128)])]
    trainer.add_callback(EpochCallback(trainer, *(parts or parts_of(batches))))
    return trainer


@pytest.fixture(scope='module')
def whole_trainer(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp('trainer')
    trainer = hugging_face(data[0], folder)
    trainer.train()
    return trainer, folder


@pytest.mark.slow
def test_trainer(whole_trainer, data):
    trainer, _ = whole_trainer
    assert trainer.model.network.phase == 'attn' and sum(numbers(trainer.model)) == KEEP
    assert not trainer.model._load_state_dict_pre_hooks  # it loads as any other again
    print('Trainer', accuracy(trainer.model.network, data[1]))
    assert accuracy(trainer.model.network, data[1]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize('step', [60, 70, 140])
def test_trainer_resumes(step, whole_trainer, data, tmp_path):
    whole, folder = whole_trainer
    trainer = hugging_face(data[0], tmp_path)
    trainer.train(resume_from_checkpoint=str(folder / f'checkpoint-{step}'))
    assert_same(trainer.model, whole.model.state_dict())


@pytest.mark.slow
def test_trainer_with_an_optimizer_of_its_own(data, tmp_path):
    """And a schedule: a tenth of the rate in the second phase."""

    def trainer(folder):
        network = Classifier()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 if step < SWITCH * STEPS else 0.1)
        settings = dict(save_steps=STEPS, num_train_epochs=SWITCH + 2)
        return hugging_face(data[0], folder, network, optimizers=(optimizer, schedule), **settings)

    whole = trainer(tmp_path / 'whole')
    whole.train()
    rates = [log['learning_rate'] for log in whole.state.log_history[:-1]]
    logged = SWITCH if new_hugging_face() else rates.count(0.1)  # older ones log the rate of the next step
    assert rates == pytest.approx([0.1] * logged + [0.01] * (SWITCH + 2 - logged)) and SWITCH - logged in (0, 1)
    resumed = trainer(tmp_path / 'resumed')
    resumed.train(resume_from_checkpoint=str(tmp_path / f'whole/checkpoint-{(SWITCH + 1) * STEPS}'))
    assert_same(resumed.model, whole.model.state_dict())


@pytest.mark.slow
def test_trainer_with_a_model_of_its_library(data, tmp_path):
    """Heads of an unmodified ViT go by its own loss. Its files have other names, which the Trainer does not load."""
    transformers = hugging_face_library()
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_channels=1, num_labels=10, **sizes)

    def trainer(folder, loaded=None):
        torch.manual_seed(0)
        parts = [PruneHeads(epoch=1, keep=4, batches=[as_dict([data[0][i] for i in range(128)])])]
        network = loaded or transformers.ViTForImageClassification(config)
        return hugging_face(data[0], folder, network, parts=parts, save_steps=STEPS, num_train_epochs=3)

    whole, checkpoint = trainer(tmp_path / 'whole'), str(tmp_path / f'whole/checkpoint-{2 * STEPS}')
    whole.train()
    assert sum(numbers(whole.model)) == 4
    with pytest.raises(ValueError, match='does not fit the ViTForImageClassification .* load_hugging_face'):
        trainer(tmp_path / 'refused').train(resume_from_checkpoint=checkpoint)
    resumed = trainer(tmp_path / 'resumed', load_hugging_face(checkpoint))
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same(resumed.model, whole.model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize('library', ['torch', 'transformers'])
def test_trainer_with_adafactor(library, data, tmp_path):
    """Its state cannot lose heads: a checkpoint of before the pruning is refused for that, not for its weights."""
    settings = dict(max_steps=20, optim='adafactor')

    def trainer(folder):
        network = Classifier()
        optimizer = torch.optim.Adafactor(network.parameters()) if library == 'torch' else None
        return hugging_face(data[0], folder, network, optimizers=(optimizer, None), **settings)

    trainer(tmp_path / 'whole').train()
    resumed, checkpoint = trainer(tmp_path / 'resumed'), str(tmp_path / 'whole/checkpoint-10')
    with pytest.raises(ValueError) as refused:
        resumed.train(resume_from_checkpoint=checkpoint)
    assert 'use an optimizer such as AdamW' in str(refused.value) and 'leave out the EpochCallback' in str(
        refused.value
    )
    resumed.remove_callback(resumed.callback_handler.callbacks[-1])
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == 20


def test_a_network_that_follows_before_its_optimizer(data, tmp_path):
    trainer = hugging_face(data[0], tmp_path)
    callback = trainer.callback_handler.callbacks[-1]
    own = dict(model=network(), optimizer=trainer.optimizer)
    with pytest.raises(ValueError, match='parameters of before the CMHSANetwork took the structure of the checkpoint'):
        callback.on_train_begin(None, None, None, **own)


def test_refused_by_the_callback(data, tmp_path):
    trainer = hugging_face(data[0], tmp_path)
    callback = type(trainer.callback_handler.callbacks[-1])
    with pytest.raises(ValueError, match='finds no convolution layers='):
        callback(trainer, TwoPhases(epoch=1, layers='stage*'))
    trainer.model_init = Classifier
    with pytest.raises(ValueError, match='has a model_init, which builds another model later: give it a model'):
        callback(trainer)
    trainer.args._n_gpu = 2
    with pytest.raises(TypeError, match='the trainer has 2 devices, and wraps the model once: use a run'):
        callback(trainer)


@pytest.mark.slow
def test_trainer_loads_its_best_model(data, tmp_path):
    """Here that of the first phase, into a model of the second that has fewer heads."""
    best = dict(
        eval_strategy='epoch', load_best_model_at_end=True, metric_for_best_model='loss', greater_is_better=True
    )
    trainer = hugging_face(data[0], tmp_path, save_strategy='epoch', num_train_epochs=PRUNE + 1, **best)
    trainer.train()
    checkpoint = tmp_path / f'checkpoint-{STEPS}'
    assert trainer.state.best_model_checkpoint == str(checkpoint)
    network, images = Classifier().network, data[1][0][0][None]
    network.load_state_dict({name[8:]: value for name, value in load_file(checkpoint / 'model.safetensors').items()})
    assert network.phase == 'conv' and sum(numbers(trainer.model)) == 18
    assert torch.allclose(trainer.model.network.eval()(images), network.eval()(images), atol=1e-2)


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter([self.data[i] for i in range(128)])

    def __getitem__(self, index):
        return self.data[index]


@pytest.mark.slow
def test_trainer_of_a_stream(data, tmp_path):
    """The Trainer does not know its epochs, of two batches each."""
    epochs = []
    part = SimpleNamespace(check=lambda model: None, on_epoch_begin=lambda *args: epochs.append(args[2]))
    parts = part, TwoPhases(epoch=2)
    trainer = hugging_face(Stream(data[0]), tmp_path, parts=parts, max_steps=8, save_steps=3)
    trainer.train()
    assert trainer.model.network.phase == 'attn' and epochs == [0, 1, 2, 3]


@pytest.mark.slow
def test_lightning_on_several_devices():
    pytest.importorskip('lightning')
    from attncnn_plugin.training.lightning import EpochCallback

    with pytest.raises(TypeError, match='the trainer has 2 devices, and wraps the model once'):
        EpochCallback(TwoPhases(epoch=1)).setup(SimpleNamespace(world_size=2, callbacks=[]), network(), 'fit')


@pytest.mark.slow
def test_an_epoch_that_lightning_does_not_begin():
    """As where it resumes from a checkpoint of the last batch of the epoch before."""
    pytest.importorskip('lightning')
    from attncnn_plugin.training.lightning import EpochCallback

    begun = []
    part = SimpleNamespace(check=lambda module: None, on_epoch_begin=lambda *args: begun.append(args[2]))
    callback, module = EpochCallback(part), nn.Linear(2, 2)
    trainer = SimpleNamespace(world_size=1, callbacks=[], optimizers=[], current_epoch=1)
    callback.setup(trainer, module, 'fit')
    callback.on_train_batch_start(trainer, module, None, 5)  # in the middle of it
    assert begun == []
    callback.on_train_batch_start(trainer, module, None, 0)
    callback.on_train_batch_start(trainer, module, None, 1)
    trainer.current_epoch = 2
    callback.on_train_epoch_start(trainer, module)
    callback.on_train_batch_start(trainer, module, None, 0)
    assert begun == [1, 2]


def test_lightning_with_other_parameters_and_a_second_fit():
    pytest.importorskip('lightning')
    from attncnn_plugin.training.lightning import EpochCallback

    module, other, callback, checkpoint = network(), nn.Parameter(torch.zeros(1)), EpochCallback(), {}
    orders = [[other, *reversed([*module.parameters()])], [other, *module.parameters()]]
    trainers = [
        SimpleNamespace(world_size=1, callbacks=[], optimizers=[torch.optim.SGD(order, lr=0.1)]) for order in orders
    ]

    def fit(trainer):
        callback.on_fit_start(trainer, module)
        return [id(parameter) for parameter in trainer.optimizers[0].param_groups[0]['params']]

    callback.setup(trainers[0], module, 'fit')
    callback.on_save_checkpoint(trainers[0], module, checkpoint)
    callback.setup(trainers[1], module, 'fit')
    assert fit(trainers[1]) == [*map(id, orders[1])]
    callback.on_load_checkpoint(trainers[1], module, checkpoint)
    assert fit(trainers[1]) == [*map(id, orders[0])]
    trainers[1].optimizers = [torch.optim.SGD(orders[1], lr=0.1)]
    callback.setup(trainers[1], module, 'fit')
    assert fit(trainers[1]) == [*map(id, orders[1])]
    assert len(module._load_state_dict_pre_hooks) == 1
    callback.on_exception(trainers[1], module, KeyboardInterrupt())
    assert not module._load_state_dict_pre_hooks


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

    def run(folder, path=None, averaging=None):
        module, averaging = Module(), averaging or library.callbacks.EMAWeightAveraging(decay=0.9)
        save, save_last = (
            library.callbacks.ModelCheckpoint(folder, name, save_top_k=-1, **when)
            for name, when in [
                ('{epoch}', dict(save_on_train_epoch_end=True)),
                ('{step}', dict(every_n_train_steps=STEPS, save_on_train_epoch_end=False)),
            ]
        )
        settings = dict(accelerator='cpu', logger=False, enable_progress_bar=False, enable_model_summary=False)
        callbacks = [save, save_last, averaging, EpochCallback(*parts_of(batches))]
        trainer = library.Trainer(max_epochs=EPOCHS, default_root_dir=folder, callbacks=callbacks, **settings)
        order = torch.utils.data.DistributedSampler(train, 1, 0)  # by the epoch
        trainer.fit(module, DataLoader(train, 64, sampler=order), ckpt_path=path)
        return module

    folder = tmp_path_factory.mktemp('lightning')
    return run, run(folder), folder, library


@pytest.mark.slow
def test_lightning_with_stochastic_averages(whole_lightning, tmp_path):
    """Whose copy changes with the module, and has its weights in the end."""
    run, _, _, library = whole_lightning
    averaging = library.callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=2)
    module = run(tmp_path, averaging=averaging)
    assert module.network.phase == 'attn' and sum(numbers(module)) == KEEP
    assert_same(module, averaging._average_model.state_dict())


@pytest.mark.slow
def test_lightning(whole_lightning, data):
    _, module, *_ = whole_lightning
    assert not module._load_state_dict_pre_hooks  # it loads as any other again
    assert module.network.phase == 'attn' and sum(numbers(module)) == KEEP
    print('Lightning', accuracy(module, data[1]))
    assert accuracy(module, data[1]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        *[f'epoch={epoch}' for epoch in (SWITCH - 1, SWITCH, PRUNE - 1, PRUNE)],
        *[f'step={STEPS * epoch}' for epoch in (SWITCH, PRUNE)],  # the last batch: Lightning begins no epoch then
    ],
)
def test_lightning_resumes(name, whole_lightning, tmp_path):
    run, module, folder, _ = whole_lightning
    assert_same(run(tmp_path, folder / f'{name}.ckpt'), module.state_dict())
