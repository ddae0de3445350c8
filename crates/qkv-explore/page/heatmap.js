// The heatmap view of one head, for matrices small enough to be fetched whole.

import { Chart } from 'qkv/chart';
import { point } from 'qkv/hover';
import { folded, holding, matrix, unitOf } from 'qkv/matrix';
import { palette } from 'qkv/palette';
import { at, fits, headName, headsIn, layerName, stepwise } from 'qkv/run';
import { say } from 'qkv/say';
import { colors, scale } from 'qkv/scale';
import { pick } from 'qkv/selection';
import { heldWeights, weightsOf } from 'qkv/source';
import { choose } from 'qkv/state';
import { theme } from 'qkv/theme';
import { spoken, tip } from 'qkv/tip';

/** What the chart needs for drawing: colors, scale, and the selected rows and columns with their bars. */
export function chartOptions(drawn, state, room, step = null) {
  const shades = palette(state.palette, theme());
  const values = drawn.kept ? drawn.values.filter((_, i) => drawn.kept[i]) : drawn.values;
  const measure = scale(state.scale, values);
  const [rows, cols] = [holding(drawn.rows, state.rows), holding(drawn.cols, state.cols)];
  return {
    palette: shades, scale: measure, table: colors(measure, shades), rows, cols, step, room,
    rowBars: rows.length ? folded(drawn, rows, state.fold, false) : null,
    colBars: cols.length ? folded(drawn, cols, state.fold, true) : null,
  };
}

/** A chart with the hover, selection and tooltips of all heatmaps of this page. `open(row, col)` gets units. */
export function pointedChart(host, pane, label, { drawn, open, note }) {
  const cell = (row, col) => {
    const { rows, cols, values, sums } = drawn();
    const shown = values.subarray(row * cols.length, (row + 1) * cols.length).reduce((sum, value) => sum + value, 0);
    return { query: rows[row].label, key: cols[col].label, value: values[row * cols.length + col], sum: sums[row], shown, note: note?.(row, col) };
  };
  return new Chart(host, {
    point: (row, col, aloud) => {
      if (row === null && col === null) { point(null); return; }
      const { rows, cols } = drawn();
      point({ row: row === null ? null : rows[row].members[0], col: col === null ? null : cols[col].members[0], from: pane.side });
      if (aloud && row !== null && col !== null) say(spoken(cell(row, col)));
    },
    open: (row, col) => open(drawn().rows[row], drawn().cols[col]),
    pick: (side, index, event) => pick(side, index, drawn()[side], event),
    tip: (row, col) => tip(cell(row, col)),
  }, label);
}

/** Marks the cell that is hovered in any pane. */
export function markIn(chart, drawn, pane, cell) {
  if (!drawn) return;
  const unit = (units, token) => (token === null || token === undefined ? null : unitOf(units, token));
  chart.mark(unit(drawn.rows, cell?.row), unit(drawn.cols, cell?.col), cell?.from === pane.side);
}

/** Prefetches the neighboring heads. */
export function prefetch(run, index, head) {
  const layer = run.layers[index];
  const heads = headsIn(layer);
  const here = heads.indexOf(head);
  const near = [heads[here + 1], heads[here - 1]].filter((one) => one !== undefined && one !== 'mean').map((one) => [index, one]);
  for (const beside of [index + 1, index - 1]) {
    if (head !== 'mean' && run.layers[beside] && fits(run.layers[beside]) && head < run.layers[beside].heads) near.push([beside, head]);
  }
  for (const [at, one] of near) weightsOf(run, at, one).catch(() => {});
}

function open(host, pane) {
  const { run } = pane;
  let [drawn, weights, shown, now] = [null, null, null, null];

  const chart = pointedChart(host, pane, 'Weights of one head: arrows move, Enter shows how a weight is computed, Space picks a row', {
    drawn: () => drawn,
    open: (row, col) => {
      if (run.can.pair) choose({ cell: strongest(row.members, col.members) }, { push: true });
    },
    note: (row, col) => (drawn.rows[row].members.length > 1 || drawn.cols[col].members.length > 1 ? 'sum over the columns of a word, mean over its rows' : undefined),
  });

  function strongest(rows, cols) { // of a word's tokens, the pair with the largest weight
    let best = [rows[0], cols[0]];
    for (const i of rows) for (const j of cols) if (weights[i * now.layer.m + j] > weights[best[0] * now.layer.m + best[1]]) best = [i, j];
    return best;
  }

  function draw(state) {
    const { layer } = now;
    drawn = matrix(weights, [layer.n, layer.m], [run.sides[layer.queries].tokens, run.sides[layer.keys].tokens], state);
    const step = stepwise(run, layer) && state.step !== null ? unitOf(drawn.rows, state.step) : null;
    const look = chartOptions(drawn, state, host.clientWidth, step === -1 ? null : step);
    chart.draw(drawn, look);
    pane.legend(look.scale, look.palette);
  }

  return {
    async show(state) {
      now = at(run, state);
      const request = shown = {};
      const { index, layer, head } = now;
      weights = heldWeights(run, index, head) ?? (pane.busy(true), await weightsOf(run, index, head));
      if (request !== shown) return;
      pane.busy(false);
      draw(state);
      chart.over.setAttribute('aria-label', `Weights of ${layerName(layer)}, ${headName(layer, head)}: arrows move, Enter shows how a weight is computed, Space picks a row`);
      prefetch(run, index, head);
    },
    mark: (cell) => markIn(chart, drawn, pane, cell),
    picture: () => chart.picture(),
    numbers: () => drawn,
    close: () => { shown = null; },
  };
}

export const heatmap = { tab: 'heatmap', name: 'Heatmap', hint: 'every weight of one head', suits: (run, layer) => fits(layer), open };
