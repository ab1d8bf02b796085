"""A trial of a learning-rate sweep: reads `lr` and `batch_size`, submits the loss.

rlm-batch sweep examples/learning_rate.py --grid lr=0.001,0.01 --grid batch_size=32,64 --minimize loss
"""

import random

random.seed(42)
loss = 1.0 / (lr * batch_size + 0.01) + random.random() * 0.1
SUBMIT(lr=lr, batch_size=batch_size, loss=loss)
