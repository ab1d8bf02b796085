"""A network with one hidden layer learns noisy digits, in pure Python: a trial of a sweep that searches.

rlm-batch sweep examples/digits.py --space lr=log:0.001..1.0 --space hidden=4..32:4 --space decay=log:1e-6..0.1 \
  --trials 30 --pruner asha --maximize accuracy
"""

import math
import random

GLYPHS = "7b6f 2c97 73e7 73cf 5bc9 79cf 79ef 7249 7bef 7bcf".split()  # 3 by 5 pixels of each digit, as bits
EPOCHS = 27
NOISE = 0.06  # of the pixels that are flipped

draw = random.Random(0)


def make_samples(count):
    samples = []
    for _ in range(count):
        digit = draw.randrange(10)
        bits = [int(GLYPHS[digit], 16) >> place & 1 for place in range(15)]
        samples.append(([1.0, *(float(bit ^ (draw.random() < NOISE)) for bit in bits)], digit))
    return samples


def forward(pixels):
    inner = [1.0, *(math.tanh(sum(w * x for w, x in zip(row, pixels))) for row in first)]
    scores = [sum(w * x for w, x in zip(row, inner)) for row in second]
    top = max(scores)
    shares = [math.exp(score - top) for score in scores]
    return inner, [share / sum(shares) for share in shares]


training, held_out = make_samples(300), make_samples(200)
first = [[draw.gauss(0, 0.3) for _ in range(16)] for _ in range(hidden)]
second = [[draw.gauss(0, 0.3) for _ in range(hidden + 1)] for _ in range(10)]
for epoch in range(EPOCHS):
    draw.shuffle(training)
    for pixels, digit in training:
        inner, shares = forward(pixels)
        errors = [share - (number == digit) for number, share in enumerate(shares)]
        back = [
            (1 - value * value) * sum(error * row[place] for error, row in zip(errors, second))
            for place, value in enumerate(inner)
        ]
        for error, row in zip(errors, second):
            row[:] = [w - lr * (error * x + decay * w) for w, x in zip(row, inner)]
        for error, row in zip(back[1:], first):
            row[:] = [w - lr * (error * x + decay * w) for w, x in zip(row, pixels)]
    accuracy = sum(max(range(10), key=forward(pixels)[1].__getitem__) == digit for pixels, digit in held_out) / 200
    report(accuracy, epoch)
SUBMIT(accuracy=accuracy, epochs=EPOCHS)
