# small/sa_learned_content.py for images of files, as users of its weights have them.
_base_ = [
    '../small/_base_/model_sa_quadratic.py',
    '../small/_base_/data_folder.py',
    '../small/_base_/schedule.py',
    '../small/_base_/runtime.py',
]

model = dict(backbone=dict(type='SALearned', content=True))
