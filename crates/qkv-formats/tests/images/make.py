"""Writes the images that the tests of decoding read: dark on the left, light on the right, in every kind of JPEG and WebP.

    pip install pillow
    python make.py
"""

from PIL import Image

grey = Image.new("L", (16, 8))
grey.putdata([30 if x < 8 else 220 for _ in range(8) for x in range(16)])
grey.save("grey.jpg", quality=90)
colour = Image.merge("RGB", (grey, grey.point(lambda x: x // 2), grey.point(lambda x: 255 - x)))
colour.save("colour.jpg", quality=95)
colour.save("progressive.jpg", quality=95, progressive=True)
colour.convert("CMYK").save("cmyk.jpg", quality=95)
colour.save("lossy.webp", quality=90)
colour.save("lossless.webp", lossless=True)
exif = Image.Exif()
exif[0x0112] = 6
colour.save("sideways.jpg", quality=90, exif=exif)
