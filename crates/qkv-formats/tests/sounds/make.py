"""Writes the sounds of this folder: a fifth of a second of 440 Hz in each format.    pip install av numpy"""
import av
import numpy as np

for name, codec, layout in [("tone.flac", "flac", "mono"), ("tone.mp3", "libmp3lame", "mono"), ("tone.ogg", "vorbis", "stereo")]:
    with av.open(name, "w") as out:
        stream = out.add_stream(codec, rate=16000, layout=layout)
        stream.codec_context.options = {"strict": "-2"}
        tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(3200) / 16000) * 32767).astype(np.int16)
        channels = 2 if layout == "stereo" else 1
        frame = av.AudioFrame.from_ndarray(np.repeat(tone, channels)[None], format="s16", layout=layout)
        frame.sample_rate, frame.pts = 16000, 0
        stream.codec_context.open()
        resampler = av.AudioResampler(stream.format.name, layout, 16000, stream.codec_context.frame_size or 1024)
        for part in resampler.resample(frame) + resampler.resample(None) + [None]:
            out.mux(stream.encode(part))
