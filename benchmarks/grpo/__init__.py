"""What selection saves in GRPO: the time of a training step, and the tokens until a reward is reached."""

from thresher_lab.tasks import vision

vision.prepare()
