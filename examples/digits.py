"""A trial for a search by `sweep`: a network with one hidden layer learns noisy digits, in pure Python.

rlm-batch sweep examples/digits.py --space lr=log:0.001..1.0 --space hidden=4..32:4 --space decay=log:1e-6..0.1 \
  --trials 30 --pruner asha --maximize accuracy
"""

import math
import random
from operator import mul

# 3 by 5 pixels of each digit, as bits.
GLYPHS = [0x7B6F, 0x2C97, 0x73E7, 0x73CF, 0x5BC9, 0x79CF, 0x79EF, 0x7249, 0x7BEF, 0x7BCF]
EPOCHS = 27
NOISE = 0.06  # The share of flipped pixels.

draw = random.Random(0)


def make_samples(count):
    samples = []
    for _ in range(count):
        digit = draw.randrange(10)
        bits = [GLYPHS[digit] >> place & 1 for place in range(15)]
        samples.append(([1.0, *(float(bit ^ (draw.random() < NOISE)) for bit in bits)], digit))
    return samples


def forward(pixels):
    inner = [1.0, *(math.tanh(sum(map(mul, row, pixels))) for row in first)]
    scores = [sum(map(mul, row, inner)) for row in second]
    shares = [math.exp(score - max(scores)) for score in scores]
    return inner, [share / sum(shares) for share in shares]


def descend(row, error, values):
    row[:] = [weight - lr * (error * values[place] + decay * weight) for place, weight in enumerate(row)]


def measure_accuracy():
    return sum(max(range(10), key=forward(pixels)[1].__getitem__) == digit for pixels, digit in held_out) / 200


training, held_out = make_samples(300), make_samples(200)
first = [[draw.gauss(0, 0.3) for _ in range(16)] for _ in range(hidden)]
second = [[draw.gauss(0, 0.3) for _ in range(hidden + 1)] for _ in range(10)]
for epoch in range(EPOCHS):
    draw.shuffle(training)
    for pixels, digit in training:
        inner, shares = forward(pixels)
        errors = [share - (number == digit) for number, share in enumerate(shares)]
        back = [
            (1 - value * value) * sum(error * second[number][place] for number, error in enumerate(errors))
            for place, value in enumerate(inner)
        ]
        for number, error in enumerate(errors):
            descend(second[number], error, inner)
        for number, error in enumerate(back[1:]):
            descend(first[number], error, pixels)
    report(measure_accuracy(), epoch)
SUBMIT(accuracy=measure_accuracy(), epochs=EPOCHS)
