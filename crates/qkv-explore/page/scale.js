// Maps a weight to a level in 0…1, and with a palette to a color. Linear is proportional; log shows small weights
// beside an attention sink; rank shows only the order. Colors are looked up by the upper 16 bits of the float: a table
// of 32,768 colors paints any number of weights without arithmetic.

/** Lower end of the log scale for long rows: a tenth of a uniform weight. */
export const evenly = (keys) => 0.1 / keys;

/** A scale over weights. Rank keeps a sorted sample; the others need only the largest. */
export function scale(kind, values, { most = largest(values), floor = Infinity } = {}) {
  const top = most > 0 ? most : 1;
  if (kind === 'log') {
    const low = floor < Infinity ? Math.min(floor, top / 10) : top / 1e4; // four decades by default
    return { kind, top, floor: low, at: (v) => (v <= low ? 0 : Math.min(1, Math.log(v / low) / Math.log(top / low))) };
  }
  if (kind === 'rank') {
    const order = sample(values);
    return { kind, top, at: (v) => (v > 0 && order.length ? below(order, v) / order.length : 0) };
  }
  return { kind: 'linear', top, at: (v) => Math.min(1, Math.max(0, v / top)) };
}

/** The largest weight, ignoring NaN. */
export function largest(values) {
  let most = 0;
  for (let i = 0; i < values.length; i++) if (values[i] > most) most = values[i];
  return most;
}

function sample(values) {
  const stride = Math.max(1, Math.floor(values.length / 65536));
  const kept = [];
  for (let i = 0; i < values.length; i += stride) if (values[i] > 0) kept.push(values[i]);
  return Float32Array.from(kept).sort();
}

function below(order, value) { // how many of the sample are at most this
  let [low, high] = [0, order.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (order[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

/** A palette as 256 pixels. */
export const pixelsOf = (palette) => Uint32Array.from({ length: 256 }, (_, i) => {
  const [red, green, blue] = palette(i / 255);
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
});

/** The colors of a scale by the upper 16 bits of a weight. NaN is transparent. */
export function colors(scale, palette) {
  const shades = pixelsOf(palette);
  const bits = new Uint32Array(1);
  const value = new Float32Array(bits.buffer);
  const table = new Uint32Array(65536);
  table[0] = shades[Math.round(255 * scale.at(0))];
  for (let upper = 1; upper < 0x7f80; upper++) {
    bits[0] = (upper << 16) | 0x8000;
    table[upper] = shades[Math.round(255 * scale.at(value[0]))];
  }
  table[0x8000] = table[0]; // −0
  return table;
}

/** Paints weights into an image, one pixel each. `kept`, if given, is 0 for weights below the threshold. */
export function paint(values, width, height, table, kept = null) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  for (let i = 0; i < pixels.length; i++) pixels[i] = kept && !kept[i] ? table[0] : table[bits[i] >>> 16];
  return image;
}

/** Paints a few weights by their own scale, without a table; `shades` from pixelsOf. */
export function tint(values, width, height, scale, shades) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < pixels.length; i++) pixels[i] = Number.isNaN(values[i]) ? 0 : shades[Math.round(255 * scale.at(values[i]))];
  return image;
}

/** A canvas with an image, to be drawn scaled; new or reused. */
export function stamp(image, canvas = document.createElement('canvas')) {
  [canvas.width, canvas.height] = [image.width, image.height];
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}
