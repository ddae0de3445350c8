// The list of views. A model that needs another picture (shaded text, an image) adds a view here.
//
// A view is { tab, name, hint, suits(run, layer), open(host, pane) }. A tab shows the first of its views that suits the chosen layer.
// `open` returns { show(state), close() } and optionally mark(cell), picture() → canvas, numbers() → { rows, cols, values }.

const views = [];

/** Adds a view. */
export const addView = (view) => views.push(view);

/** The tabs, in order of registration. */
export const tabs = () => views.filter((view, i) => views.findIndex(({ tab }) => tab === view.tab) === i);

/** The view that a tab shows for a layer; undefined if none suits. */
export const viewFor = (tab, run, layer) => views.find((view) => view.tab === tab && view.suits(run, layer));

/** The default tab of a run. */
export const firstView = (run, layer) => tabs().find(({ tab }) => viewFor(tab, run, layer)).tab;
