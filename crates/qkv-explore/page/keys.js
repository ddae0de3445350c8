// Keyboard shortcuts and their list. Widgets that use arrow keys (tokens, thumbnails, tables, sliders, the focused
// figure) handle them first; Shift and arrows change layer and head everywhere.

import { fill, h, place } from 'qkv/element';

const list = [];

/** Registers a shortcut: `keys` as the browser names them, `shown` for the list. */
export const addKey = (keys, shown, meaning, act) => list.push({ keys, shown, meaning, act });

const typed = (target) => target.closest('input:not([type=checkbox]):not([type=range]), select, textarea');
const arrows = (target) => target.closest('input[type=range], input[type=radio], summary, [role=application]');

/** Shows or hides the list of keys. */
export function toggleHelp() {
  const help = place('help');
  if (help.open) { help.close(); return; }
  fill(help, h('h2', {}, 'Keys'),
    h('dl', {}, list.filter(({ shown }) => shown).map(({ shown, meaning }) => [h('dt', {}, shown.split(' ').map((key) => h('kbd', {}, key))), h('dd', {}, meaning)])),
    h('p', { class: 'quiet' }, 'In the picture (reached by Tab) arrows move from cell to cell, Enter shows how a weight is computed, Space picks its row, k its column. Shift and arrows change layer and head from anywhere.'),
    h('button', { type: 'button', class: 'go', onclick: () => help.close() }, 'Close'));
  help.showModal();
}

document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const arrow = event.key.startsWith('Arrow');
  if (place('help').open || (typed(event.target) && event.key !== 'Escape')) return;
  if (arrow && !event.shiftKey && arrows(event.target)) return;
  const known = list.find(({ keys }) => keys.includes(event.key));
  if (!known || known.act(event) === false) return;
  event.preventDefault();
});
