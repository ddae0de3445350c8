// The selected tokens: click selects one, Ctrl or ⌘ toggles one, Shift selects a range.

import { chosen, choose } from 'qkv/state';

const last = { rows: null, cols: null };

/** Selects a unit of a side ("rows" or "cols") by an event. */
export function pick(side, index, units, event) {
  const members = units[index].members;
  const now = new Set(chosen()[side]);
  const has = members.every((member) => now.has(member));
  if (event.shiftKey && last[side] !== null && last[side] < units.length) {
    const [from, to] = [Math.min(last[side], index), Math.max(last[side], index)];
    for (const unit of units.slice(from, to + 1)) for (const member of unit.members) now.add(member);
  } else if (event.ctrlKey || event.metaKey) {
    for (const member of members) if (has) now.delete(member); else now.add(member);
  } else {
    const alone = has && now.size === members.length;
    now.clear();
    if (!alone) for (const member of members) now.add(member);
  }
  last[side] = index;
  choose({ [side]: [...now].sort((a, b) => a - b) });
}

/** Clears the selection. */
export const unpick = () => choose({ rows: [], cols: [] });
