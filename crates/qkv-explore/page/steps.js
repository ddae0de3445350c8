// The decoding steps: one per token, with a slider, a play button and the other candidates.

import { fill, h, place, rove } from 'qkv/element';
import { percent } from 'qkv/number';
import { written } from 'qkv/run';
import { say } from 'qkv/say';
import { chosen, choose } from 'qkv/state';

const pace = 900; // ms per step
let timer = null;
let parts = null;

function stop() {
  clearInterval(timer);
  timer = null;
  if (parts) parts.play.textContent = '▶';
  parts?.play.setAttribute('aria-label', 'Play the steps');
}

function play(run) {
  if (timer) { stop(); return; }
  const start = chosen().step;
  choose({ step: start === null || start >= run.steps.length - 1 ? 0 : start });
  parts.play.textContent = '❚❚';
  parts.play.setAttribute('aria-label', 'Pause');
  timer = setInterval(() => {
    const next = (chosen().step ?? -1) + 1;
    if (next >= run.steps.length) stop(); else choose({ step: next });
  }, pace);
}

/** Builds the steps of a run, if it has any. */
export function buildSteps(run) {
  stop();
  const host = place('steps');
  host.hidden = !run.steps?.length;
  if (host.hidden) { parts = null; return; }
  const playButton = h('button', { type: 'button', class: 'round', 'aria-label': 'Play the steps', title: 'play (p)', onclick: () => play(run) }, '▶');
  const slider = h('input', { type: 'range', min: 0, max: run.steps.length - 1, step: 1, 'aria-label': 'Step', oninput: () => { stop(); choose({ step: Number(slider.value) }); } });
  const chips = run.steps.map((step, i) => h('button', { type: 'button', class: 'chip', tabIndex: i ? -1 : 0, onclick: () => { stop(); choose({ step: chosen().step === i ? null : i }); } }, written(step)));
  const row = h('div', { class: 'chips', role: 'group', 'aria-label': 'Tokens written', onkeydown: (event) => rove(event, chips) }, chips);
  const candidates = h('div', { class: 'candidates', hidden: true });
  const all = h('button', { type: 'button', class: 'link quiet', hidden: true, onclick: () => { stop(); choose({ step: null }); } }, 'all steps');
  parts = { run, play: playButton, slider, chips, candidates, all };
  fill(host, h('div', { class: 'player' }, playButton, slider, row, all), candidates);
}

/** Starts or stops playing. */
export const togglePlay = () => { if (parts) play(parts.run); };

/** Shows the chosen step: the token, its probability, the other candidates. */
export function showSteps(state, before) {
  if (!parts) return;
  const { run, slider, chips, candidates, all } = parts;
  const step = state.step !== null && state.step < run.steps.length ? state.step : null;
  slider.value = step ?? run.steps.length - 1;
  slider.setAttribute('aria-valuetext', step === null ? 'all steps' : `step ${step}, writes ${written(run.steps[step])}`);
  chips.forEach((chip, i) => {
    chip.classList.toggle('now', i === step);
    chip.classList.toggle('later', step !== null && i > step);
    chip.setAttribute('aria-pressed', String(i === step));
  });
  all.hidden = step === null;
  candidates.hidden = step === null;
  if (step === null) return;
  const { probability, candidates: list } = run.steps[step];
  fill(candidates, h('span', { class: 'quiet' }, `step ${step} writes`), (list ?? []).map((one, i) => {
    const bar = h('span', { class: i === 0 ? 'candidate first' : 'candidate' }, h('b', {}, written(one)), h('span', {}, percent(one.probability)));
    bar.style.setProperty('--share', `${(100 * one.probability).toFixed(1)}%`);
    return bar;
  }));
  if (state.step !== before?.step) say(`step ${step} writes ${written(run.steps[step])}, ${percent(probability)}`);
}
