// Owns light and dark: what the user chose, or what the system says, and the page's few colours for those who draw on canvas.

const dark = window.matchMedia('(prefers-color-scheme: dark)');
let choice = 'auto';
let ink = null;

/** "light" or "dark", whichever is shown. */
export const theme = () => (choice === 'auto' ? (dark.matches ? 'dark' : 'light') : choice);

/** Shows the page in the chosen theme. */
export function dress(chosen) {
  choice = chosen;
  document.documentElement.dataset.theme = theme();
  ink = null;
}

/** The page's colours and type, as the style sheet has them. */
export function inks() {
  if (!ink) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    ink = { text: colour('text'), quiet: colour('quiet'), line: colour('line'), paper: colour('paper'), accent: colour('accent'), font: colour('sans') };
  }
  return ink;
}

/** Calls back when the system changes its mind and the user has none. */
export function onSystemTheme(listener) {
  dark.addEventListener('change', () => {
    if (choice !== 'auto') return;
    dress('auto');
    listener();
  });
}
