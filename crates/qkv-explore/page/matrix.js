// Prepares the weights of a head for drawing: merges subwords, leaves out tokens, renormalizes rows on request and
// marks weights below the threshold. The weights themselves are not changed.

import { written } from 'qkv/run';

/** A row or column: one token, or the tokens of a word. */
export function units(tokens, { words, special, sink }, keys) {
  const units = [];
  tokens.forEach((token, index) => {
    if ((token.special && !special) || (keys && index === 0 && !sink)) return;
    const last = units.at(-1);
    if (words && last && token.word !== null && token.word !== undefined && last.word === token.word) {
      last.label += written(token);
      last.members.push(index);
    } else {
      units.push({ label: written(token), members: [index], word: token.special ? null : token.word, special: token.special });
    }
  });
  return units;
}

/**
 * The matrix that is drawn, from weights [n, m] and the tokens of both sides:
 * { rows, cols: units; values [rows, cols]; sums: of whole rows before tokens were left out; kept: which pass the threshold }.
 * Columns of a word are summed, rows averaged, so that rows still sum to 1.
 */
export function matrix(weights, [n, m], [queries, keys], display) {
  const rows = units(queries, display, false);
  const cols = units(keys, display, true);
  const values = new Float32Array(rows.length * cols.length);
  const sums = new Float64Array(rows.length);
  rows.forEach((row, r) => {
    for (const i of row.members) {
      for (let j = 0; j < m; j++) sums[r] += weights[i * m + j] / row.members.length;
    }
    let total = 0;
    cols.forEach((col, c) => {
      let value = 0;
      for (const i of row.members) for (const j of col.members) value += weights[i * m + j];
      value /= row.members.length;
      values[r * cols.length + c] = value;
      total += value;
    });
    if (display.renormalize && total > 0) for (let c = 0; c < cols.length; c++) values[r * cols.length + c] /= total;
  });
  return { rows, cols, values, sums, kept: display.mass < 1 ? heaviest(values, cols.length, display.mass) : null };
}

/** Marks the fewest largest weights of each row that reach this fraction of the row. */
export function heaviest(values, m, mass) {
  const kept = new Uint8Array(values.length);
  for (let start = 0; start < values.length; start += m) {
    const order = Array.from({ length: m }, (_, j) => start + j).sort((a, b) => values[b] - values[a]);
    const goal = mass * order.reduce((sum, i) => sum + values[i], 0);
    let sum = 0;
    for (const i of order) {
      if (sum >= goal - 1e-9 || values[i] <= 0) break;
      kept[i] = 1;
      sum += values[i];
    }
  }
  return kept;
}

/** The units that contain any of these tokens. */
export function holding(units, tokens) {
  const wanted = new Set(tokens);
  return units.flatMap((unit, index) => (unit.members.some((member) => wanted.has(member)) ? [index] : []));
}

/** The unit that contains a token, or −1. */
export const unitOf = (units, token) => units.findIndex((unit) => unit.members.includes(token));

/** The mean or the sum (`fold`) of the selected rows per column, or with `ofColumns` of the selected columns per row. */
export function folded({ rows, cols, values }, lines, fold, ofColumns) {
  const m = cols.length;
  const out = new Float64Array(ofColumns ? rows.length : m);
  for (const line of lines) {
    for (let i = 0; i < out.length; i++) out[i] += values[ofColumns ? i * m + line : line * m + i];
  }
  return fold === 'mean' && lines.length ? out.map((value) => value / lines.length) : out;
}
