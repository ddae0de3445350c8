// Exports: files that the server renders, and the picture and its numbers as shown.

import { h } from 'qkv/element';
import { at, fits, headName } from 'qkv/run';
import { source } from 'qkv/source';
import { theme } from 'qkv/theme';

const formats = [
  ['svg', 'SVG', 'a drawing for print'], ['png', 'PNG', 'a picture'], ['html', 'HTML', 'one standalone file'],
  ['csv', 'CSV', 'a table with tokens'], ['json', 'JSON', 'tokens and weights'], ['npy', 'NumPy', 'weights only'],
  ['safetensors', 'safetensors', 'weights only'], ['pharaoh', 'Pharaoh', 'word alignment'],
];

function save(blob, name) {
  const link = h('a', { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A CSV cell: quoted, and never a spreadsheet formula. */
const quoted = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;

/** The numbers shown as CSV, with a header line and a label per row. */
export function csv({ rows, cols, values }) {
  const lines = rows.map((row, r) => [quoted(row.label), ...values.subarray(r * cols.length, (r + 1) * cols.length)].join(','));
  return [['""', ...cols.map(({ label }) => quoted(label))].join(','), ...lines].join('\r\n');
}

/** The URL of a file rendered by the server. */
function download(run, state, format, shown) {
  const { index, layer, head } = at(run, state);
  const whole = fits(layer) || !shown ? {} : { rows: shown.rows.join('..'), cols: shown.cols.join('..') };
  return source.download(run, {
    format, layer: index, head: head === 'mean' ? undefined : head, ...whole, words: Number(state.words), special: Number(state.special), scale: state.scale, palette: state.palette, theme: theme(),
  });
}

/** The export button and its menu. `pane` returns the pane to export. */
export function exporter(pane, chosen) {
  const items = h('div', { class: 'menu', role: 'group', 'aria-label': 'Files' });
  const name = () => `${at(pane().run, chosen()).layer.name}.${at(pane().run, chosen()).head}`;
  const entry = (title, hint, act) => h('button', { type: 'button', onclick: () => { act(); details.open = false; } }, title, h('small', {}, hint));
  function build() {
    const { run, open } = pane();
    const byProgram = run.can.export && ['heatmap', 'lines', 'grid', 'document', 'image', 'sound'].includes(chosen().view);
    const numbers = open?.numbers?.();
    items.replaceChildren(...[
      open?.picture ? entry('This picture', 'PNG, as it is shown', () => open.picture().toBlob((blob) => save(blob, `${name()}.png`))) : null,
      numbers ? entry('These numbers', 'CSV, as they are shown', () => save(new Blob([csv(numbers)], { type: 'text/csv' }), `${name()}.csv`)) : null,
      byProgram ? h('p', { class: 'quiet' }, `${headName(at(run, chosen()).layer, at(run, chosen()).head)}, written by the program`) : null,
      ...(byProgram ? formats.map(([format, title, hint]) => h('a', { href: download(run, chosen(), format, open?.shown?.()), download: '', 'data-format': format, onclick: () => { details.open = false; } }, title, h('small', {}, hint))) : []),
    ].filter(Boolean));
  }
  const details = h('details', { class: 'drop', id: 'export' }, h('summary', { title: 'export (e)' }, 'Export'), items);
  // Empty while closed, so that a stale entry cannot be clicked.
  details.addEventListener('toggle', () => { if (details.open) build(); else items.replaceChildren(); });
  details.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    details.open = false;
    details.querySelector('summary').focus();
    event.stopPropagation();
  });
  document.addEventListener('pointerdown', (event) => { if (!details.contains(event.target)) details.open = false; });
  return details;
}
