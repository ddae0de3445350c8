// The rollout view: attention through the layers of a group, from the first to the one chosen by the slider. For long
// inputs one row is shown as a profile over the keys.

import { h, sized } from 'qkv/element';
import { chartOptions, markIn, pointedChart } from 'qkv/heatmap';
import { matrix } from 'qkv/matrix';
import { count } from 'qkv/number';
import { at, fits, groupName } from 'qkv/run';
import { rolloutOf } from 'qkv/source';
import { chosen, choose } from 'qkv/state';
import { inks } from 'qkv/theme';

/** Groups of self-attention: only these have a rollout. */
const followed = (run) => run.groups.filter(({ layers }) => layers.length && layers.every((i) => run.layers[i].queries === run.layers[i].keys));

function open(host, pane) {
  const { run } = pane;
  const slider = h('input', { type: 'range', min: 1, step: 1, 'aria-label': 'Layers', oninput: () => choose({ depth: Number(slider.value) }) });
  const said = h('output', {});
  const groups = h('span', { class: 'segments', role: 'group', 'aria-label': 'Group' });
  const rowAt = h('input', { type: 'number', min: 0, 'aria-label': 'Row', onchange: () => choose({ rows: [Number(rowAt.value)] }) });
  const rowLabel = h('label', { hidden: true }, 'from row ', rowAt);
  const body = h('div');
  host.append(h('div', { class: 'knobs' }, groups, h('label', {}, 'through ', slider, said), rowLabel), body);
  const note = h('p', { class: 'quiet note' }, 'Each layer’s heads are averaged, half of every token stays with itself (the residual path), and the layers are multiplied. A picture of where attention could have carried something, not of what it carried.');
  pane.element.append(note);
  let [drawn, shown, chart, profile] = [null, null, null, null];

  function chosenGroup(state) {
    const all = followed(run);
    return all.find(({ name }) => name === at(run, state).layer.group) ?? all[0];
  }

  function drawMatrix(values, layer, state) {
    profile?.remove();
    profile = null;
    chart ??= pointedChart(body, pane, 'Rollout: arrows move', { drawn: () => drawn, open() {} });
    const tokens = run.sides[layer.queries].tokens;
    drawn = matrix(values, [layer.n, layer.m], [tokens, tokens], state);
    const look = chartOptions(drawn, state, host.clientWidth);
    chart.draw(drawn, look);
    pane.legend(look.scale, look.palette);
  }

  function drawProfile(values, row) {
    drawn = null;
    chart?.frame.remove();
    chart = null;
    profile ??= body.appendChild(h('canvas', { role: 'img' }));
    profile.setAttribute('aria-label', `Rollout of row ${row} over ${values.length} keys`);
    const [width, height] = [host.clientWidth, 160];
    const context = sized(profile, width, height);
    const most = values.reduce((a, b) => Math.max(a, b), 1e-12);
    context.fillStyle = inks().accent;
    for (let x = 0; x < width; x++) {
      let peak = 0;
      for (let j = Math.floor((x * values.length) / width); j < Math.max(Math.floor((x * values.length) / width) + 1, ((x + 1) * values.length) / width) && j < values.length; j++) peak = Math.max(peak, values[j]);
      context.fillRect(x, height - (peak / most) * (height - 4), 1, (peak / most) * (height - 4));
    }
    pane.legend(null);
  }

  return {
    async show(state) {
      const group = chosenGroup(state);
      const layer = run.layers[group.layers[0]];
      const depth = Math.min(group.layers.length, state.depth ?? group.layers.length);
      slider.max = group.layers.length;
      slider.value = depth;
      said.textContent = ` ${depth} of ${group.layers.length} layers`;
      groups.hidden = followed(run).length < 2;
      groups.replaceChildren(...followed(run).map(({ name, layers }) => h('button', {
        type: 'button', 'aria-pressed': String(name === group.name), onclick: () => choose({ layer: layers[0], depth: null }),
      }, groupName(name))));
      const whole = fits(layer);
      const row = Math.min(layer.n - 1, chosen().rows[0] ?? layer.n - 1);
      rowLabel.hidden = whole;
      rowAt.max = layer.n - 1;
      rowAt.value = row;
      rowAt.title = `0 to ${count(layer.n - 1)}`;
      const asked = shown = {};
      pane.busy(true);
      const values = await rolloutOf(run, group.name, depth, whole ? [0, layer.n] : [row, row + 1]);
      if (asked !== shown) return;
      pane.busy(false);
      if (whole) drawMatrix(values, layer, state); else drawProfile(values, row);
    },
    mark: (cell) => chart && markIn(chart, drawn, pane, cell),
    picture: () => chart?.picture() ?? profile,
    numbers: () => drawn,
    close() {
      shown = null;
      note.remove();
    },
  };
}

export const rollout = { tab: 'rollout', name: 'Rollout', hint: 'attention followed through the layers', suits: (run) => run.can.rollout && followed(run).length > 0, open };
