// The data source of a standalone page, which contains its weights as base64. Thumbnails and tiles are pooled here by
// the same rules as on the server.

function decode(text) { // base64 → f32
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

/** The maximum or mean of a rectangle of weights [n, m]. */
function pooled(weights, m, rows, cols, pool) {
  let [most, sum] = [0, 0];
  for (let i = rows[0]; i < rows[1]; i++) {
    for (let j = cols[0]; j < cols[1]; j++) {
      const value = weights[i * m + j];
      sum += value;
      if (value > most) most = value;
    }
  }
  return pool === 'max' ? most : sum / ((rows[1] - rows[0]) * (cols[1] - cols[0]));
}

/** The range of `length` items under cell `at` of `size`: at least one. */
function covered(at, size, length) {
  const from = Math.min(length - 1, Math.floor((at * length) / size));
  return [from, Math.max(from + 1, Math.floor(((at + 1) * length) / size))];
}

/** A source that reads the data in the page: { run, weights: base64 by layer and head, heads }. */
export function embedded(carried) {
  const decoded = new Map();
  const whole = (layer, head) => {
    const key = `${layer}/${head}`;
    if (!decoded.has(key)) decoded.set(key, decode(carried.weights[layer][head]));
    return decoded.get(key);
  };
  const no = async () => { throw new Error('this needs the program: open the run with `qkv explore`'); };
  return {
    ask: no, run: no, pair: no, rollout: no, tokens: no,
    heads: async () => carried.heads,
    weights: async (run, layer, head, [a, b], [c, d]) => {
      const { m } = run.layers[layer];
      const all = whole(layer, head);
      const out = new Float32Array((b - a) * (d - c));
      for (let i = a; i < b; i++) out.set(all.subarray(i * m + c, i * m + d), (i - a) * (d - c));
      return out;
    },
    grid: async (run, size, pool) => {
      const values = [];
      run.layers.forEach(({ n, m, heads }, layer) => {
        for (let head = 0; head < heads; head++) {
          for (let i = 0; i < size; i++) {
            for (let j = 0; j < size; j++) values.push(pooled(whole(layer, head), m, covered(i, size, n), covered(j, size, m), pool));
          }
        }
      });
      return { values: Float32Array.from(values), sampled: false };
    },
    tile: async (run, { layer, head, zoom, x, y, pool }) => {
      const { n, m } = run.layers[layer];
      const deepest = Math.max(0, Math.ceil(Math.log2(Math.max(n, m) / 256)));
      const side = 2 ** (deepest - zoom); // weights per cell, each way
      const values = new Float32Array(65536).fill(NaN);
      for (let i = 0; i < 256; i++) {
        for (let j = 0; j < 256; j++) {
          const [row, col] = [(y * 256 + i) * side, (x * 256 + j) * side];
          if (row < n && col < m) {
            values[i * 256 + j] = pooled(whole(layer, head), m, [row, Math.min(n, row + side)], [col, Math.min(m, col + side)], pool);
          }
        }
      }
      return { values, sampled: false };
    },
  };
}
