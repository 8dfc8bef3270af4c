"""Logs of mmengine's local backend as numbers."""

from helpers.logs import accuracy, write_log

from attncnn_plugin.analysis import read_centers, read_scalars


def test_logs_of_a_run_that_was_resumed_are_joined(tmp_path):
    write_log(
        tmp_path,
        '20260101_000000',
        [{'loss': 2.0, 'epoch': 1, 'iter': 10, 'step': 10}, *accuracy(10.0, 20.0, 30.0), '{"accuracy/top1": 4'],
    )
    write_log(tmp_path, '20260102_000000', accuracy(25.0, 35.0, first=3))
    assert read_scalars(tmp_path)['accuracy/top1'].tolist() == [[1, 10], [2, 20], [3, 25], [4, 35]]
    path = write_log(tmp_path, '20260103_000000', accuracy(1.0))  # begun anew
    assert read_scalars(tmp_path)['accuracy/top1'].tolist() == [[1, 1]] == read_scalars(path)['accuracy/top1'].tolist()
    assert read_scalars(tmp_path)['loss'].tolist() == [[10, 2]]


def test_another_training_in_the_same_folder(tmp_path):
    def line(step, heads):
        names = [f'attention/blocks.{layer}.attn/head{head}/center' for layer, head in heads]
        return {'step': step, **{f'{name}_{axis}': float(step) for name in names for axis in ('row', 'column')}}

    write_log(tmp_path, '1', [line(step, [(0, 0), (0, 1), (1, 0)]) for step in range(3)])
    write_log(tmp_path, '2', [line(step, [(0, 0)]) for step in range(2)])
    assert {
        layer: {head: len(way) for head, way in heads.items()} for layer, heads in read_centers(tmp_path).items()
    } == {'blocks.0.attn': {0: 2}}
    write_log(tmp_path, '3', [line(step, [(0, 0), (0, 1)]) for step in range(1, 3)])  # resumed
    centers = read_centers(tmp_path)['blocks.0.attn']
    assert centers[0][:, 0].tolist() == [0, 1, 2] and centers[1][:, 0].tolist() == [1, 2]
