// The table of heads: one row per head, one column per measure, sorted by clicking a column header. The formula is its
// tooltip.

import { h } from 'qkv/element';
import { plain } from 'qkv/number';
import { at, groupName } from 'qkv/run';
import { say } from 'qkv/say';
import { headsOf } from 'qkv/source';
import { choose } from 'qkv/state';

/** Rows sorted by `sort`: "entropy" ascending, "-entropy" descending; rows without a value come last. */
export function sorted(rows, columns, sort) {
  if (!sort) return rows;
  const falls = sort.startsWith('-');
  const column = columns.findIndex(({ id }) => id === sort.replace(/^-/, ''));
  if (column < 0) return rows;
  return [...rows].sort((a, b) => {
    const [x, y] = [a.values[column], b.values[column]];
    if (x === null || y === null) return (x === null) - (y === null);
    return falls ? y - x : x - y;
  });
}

function open(host, pane) {
  const { run } = pane;
  const table = h('table', { class: 'measures' });
  const note = h('p', { class: 'quiet note' });
  host.append(h('div', { class: 'scroll' }, table), note);

  function go({ layer, head }) {
    choose({ view: 'heatmap', layer, head, cell: null }, { push: true });
  }

  function header(column, state) {
    const [rising, falling] = [state.sort === column.id, state.sort === `-${column.id}`];
    const sort = () => {
      choose({ sort: falling ? column.id : rising ? null : `-${column.id}` });
      say(`sorted by ${column.name}`);
    };
    const label = `${column.name}${column.unit ? `, ${column.unit}` : ''}: ${column.formula}`;
    return h('th', { scope: 'col', 'aria-sort': rising ? 'ascending' : falling ? 'descending' : 'none' },
      h('button', { type: 'button', title: label, onclick: sort, 'data-sort': column.id },
        column.name, h('span', { class: 'arrow', 'aria-hidden': 'true' }, rising ? '↑' : falling ? '↓' : '')),
      column.unit ? h('small', {}, column.unit) : null);
  }

  function line(row, largest, now, first) {
    const layer = run.layers[row.layer];
    const mine = row.layer === now.index && row.head === now.head;
    const element = h('tr', { tabIndex: mine || first ? 0 : -1, class: mine ? 'chosen' : '', onclick: () => go(row) },
      h('th', { scope: 'row' }, `${groupName(layer.group)} ${layer.index}`, h('span', {}, ` · head ${row.head}`)),
      row.values.map((value, c) => {
        const cell = h('td', {}, plain(value));
        if (value !== null && largest[c] > 0) cell.style.setProperty('--bar', `${Math.max(0, 100 * value / largest[c]).toFixed(1)}%`);
        return cell;
      }));
    element.go = () => go(row);
    return element;
  }

  table.addEventListener('keydown', (event) => {
    const rows = [...table.tBodies[0].rows];
    const here = rows.indexOf(document.activeElement);
    if (here < 0 || event.shiftKey) return;
    const to = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (to !== undefined && rows[to]) {
      for (const row of rows) row.tabIndex = -1;
      rows[to].tabIndex = 0;
      rows[to].focus();
    } else if (event.key === 'Enter' || event.key === ' ') rows[here].go();
    else if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
  });

  return {
    async show(state) {
      pane.legend(null);
      const { columns, rows, sampled } = await headsOf(run);
      pane.busy(false);
      const largest = columns.map((_, c) => Math.max(0, ...rows.map((row) => row.values[c] ?? 0)));
      const focused = document.activeElement?.dataset?.sort;
      const now = at(run, state);
      const listed = sorted(rows, columns, state.sort);
      const has = listed.some((row) => row.layer === now.index && row.head === now.head);
      table.replaceChildren(
        h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'head'), columns.map((column) => header(column, state)))),
        h('tbody', {}, listed.map((row, i) => line(row, largest, now, i === 0 && !has))));
      if (focused) table.querySelector(`[data-sort="${CSS.escape(focused)}"]`)?.focus();
      note.textContent = sampled ? 'Sampled: measures of a long input look at some rows only.' : 'Point at a column’s name for its formula. A click on a row opens that head.';
    },
    numbers: () => null,
    close() {},
  };
}

export const table = { tab: 'table', name: 'Table', hint: 'what each head does, in numbers', suits: (run) => run.can.heads, open };
