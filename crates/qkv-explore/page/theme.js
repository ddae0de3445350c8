// Light and dark: the choice of the user or the system, and the colors of the style sheet for canvas drawing.

const dark = window.matchMedia('(prefers-color-scheme: dark)');
let choice = 'auto';
let ink = null;

/** The current theme, "light" or "dark". */
export const theme = () => (choice === 'auto' ? (dark.matches ? 'dark' : 'light') : choice);

/** Applies the chosen theme. */
export function dress(chosen) {
  choice = chosen;
  document.documentElement.dataset.theme = theme();
  ink = null;
}

/** Colors and fonts of the style sheet. */
export function inks() {
  if (!ink) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    ink = { text: color('text'), quiet: color('quiet'), line: color('line'), paper: color('paper'), accent: color('accent'), font: color('sans') };
  }
  return ink;
}

/** Subscribes to changes of the system theme, unless the user chose one. */
export function onSystemTheme(listener) {
  dark.addEventListener('change', () => {
    if (choice !== 'auto') return;
    dress('auto');
    listener();
  });
}
