"""Logs of trainings as mmengine's local backend writes them."""

import json


def write_log(work_dir, name, lines):
    path = work_dir / name / 'vis_data' / 'scalars.json'
    path.parent.mkdir(parents=True)
    path.write_text('\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines) + '\n')
    return path


def accuracy(*values, first=1):
    return [{'accuracy/top1': value, 'step': step} for step, value in enumerate(values, start=first)]
