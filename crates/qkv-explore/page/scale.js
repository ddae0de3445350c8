// Owns how a weight becomes a place between nothing and most, 0…1, and with a palette a colour. Linear reads as it is; log shows small
// weights beside a sink that swallows nearly all; rank shows order alone.
// A colour is looked up by the upper half of a float's bits: 32,768 colours made once paint any number of weights without arithmetic.

/** Where a log scale over long rows begins: a tenth of what each key gets when a head looks everywhere alike. */
export const evenly = (keys) => 0.1 / keys;

/** A scale over some weights. For rank it keeps a sorted sample of them; otherwise only the largest counts. */
export function scale(kind, values, { most = largest(values), floor = Infinity } = {}) {
  const top = most > 0 ? most : 1;
  if (kind === 'log') {
    const low = floor < Infinity ? Math.min(floor, top / 10) : top / 1e4; // four decades, unless told otherwise
    return { kind, top, floor: low, at: (v) => (v <= low ? 0 : Math.min(1, Math.log(v / low) / Math.log(top / low))) };
  }
  if (kind === 'rank') {
    const order = sample(values);
    return { kind, top, at: (v) => (v > 0 && order.length ? below(order, v) / order.length : 0) };
  }
  return { kind: 'linear', top, at: (v) => Math.min(1, Math.max(0, v / top)) };
}

/** The largest of some weights, those that are not there (NaN) left out. */
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

/** The colours of a scale, by the upper sixteen bits of a weight. What is not there is clear. */
export function colours(scale, palette) {
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

/** Paints weights into an image, one pixel each. `kept`, where given, is 0 for those that a threshold dropped. */
export function paint(values, width, height, table, kept = null) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  for (let i = 0; i < pixels.length; i++) pixels[i] = kept && !kept[i] ? table[0] : table[bits[i] >>> 16];
  return image;
}

/** Paints a few weights by a scale of their own, without a table; `shades` as pixelsOf makes them. */
export function tint(values, width, height, scale, shades) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < pixels.length; i++) pixels[i] = Number.isNaN(values[i]) ? 0 : shades[Math.round(255 * scale.at(values[i]))];
  return image;
}

/** A canvas that holds an image, to be drawn larger or smaller: a new one, or one that is done with. */
export function stamp(image, canvas = document.createElement('canvas')) {
  [canvas.width, canvas.height] = [image.width, image.height];
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}
