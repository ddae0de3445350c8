//! The gradient of sampled hard attention is an unbiased estimate: its mean over many draws is the gradient of the
//! exact expectation, which can be enumerated for a model of two steps and three places.

use super::devices::emulated;
use super::gradients::{numbers, parameters};
use qkv::Attention;
use qkv_nn::{AttendOptions, Gradients, Machine, Parameters, Pool, Reinforce, ScoreParameters, Tape, Target, Tensor};

const WIDTH: usize = 2;
const PLACES: usize = 3;
const CLASSES: usize = 3;
const IGNORED: u32 = 9;
/// The targets of two sequences of two steps; the second sequence has only one.
const TARGETS: [u32; 4] = [1, 0, 2, IGNORED];
const LENGTHS: [usize; 2] = [2, 1];
const DRAWS: u64 = 6000;

/// The queries of both steps, and the keys and values of two sequences.
struct Given {
    queries: [Tensor<f64>; 2],
    keys: Tensor<f64>,
    values: Tensor<f64>,
}

fn given() -> Given {
    let [one, two] = [1, 2].map(|seed| numbers(&[2, 1, WIDTH], seed));
    let [keys, values] = [3, 4].map(|seed| numbers(&[2, PLACES, WIDTH], seed));
    Given { queries: [one, two], keys, values }
}

/// One draw of the gradients of the loss: of the score's vector, then of the output's matrix. The query of the second
/// step depends on the result of the first.
fn draw(
    p: &Parameters<f64>,
    given: &Given,
    how: Reinforce,
    seed: u64,
    machine: &Machine,
    pool: &Pool<f64>,
) -> Vec<f64> {
    let [vector, output] = ["p0", "p1"].map(|name| p.find(name).unwrap());
    let mut gradients = Gradients::of(p);
    let mut tape = Tape::training(p, &mut gradients, pool, machine, seed).reinforce(how);
    let attention = Attention::additive().sample();
    let parameters = ScoreParameters { v: Some(vector), ..ScoreParameters::default() };
    let [one, two] = given.queries.each_ref().map(|q| tape.constant(q.clone()));
    let [keys, values] = [&given.keys, &given.values].map(|x| tape.constant(x.clone()));
    let options = AttendOptions { parameters, ..AttendOptions::new(&attention) };
    let first = tape.attend(&one, &keys, &values, None, &options).unwrap();
    let query = tape.add(&first, two);
    let options = AttendOptions { start: 1, ..options };
    let second = tape.attend(&query, &keys, &values, None, &options).unwrap();
    let seen = tape.stack(&[first, second]);
    assert!(tape.has_chosen());
    let target = Target { ids: &TARGETS, ignore: Some(IGNORED), smoothing: 0.0, scale: 1.0 };
    let (_, log_likelihoods) = tape.cross_entropy_of_rows(&seen, output, None, target);
    tape.reward(&log_likelihoods, &LENGTHS, 1.0);
    tape.backward();
    drop(tape);
    [vector, output].iter().flat_map(|&param| gradients.get(param).to_vec()).collect()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let sum: f64 = scores.iter().map(|x| x.exp()).sum();
    scores.iter().map(|x| x.exp() / sum).collect()
}

/// The expected loss for parameters `[v, W]`, or the loss of the expected choices if `soft`.
fn exact(parameters: &[f64], given: &Given, soft: bool) -> f64 {
    let (v, w) = parameters.split_at(WIDTH);
    let mut loss = 0.0;
    for (b, &length) in LENGTHS.iter().enumerate() {
        let row = |x: &Tensor<f64>, at: usize| x.data()[(b * x.shape()[1] + at) * WIDTH..][..WIDTH].to_vec();
        let weights = |query: &[f64]| {
            let score = |j: usize| (0..WIDTH).map(|a| v[a] * (query[a] + row(&given.keys, j)[a]).tanh()).sum();
            softmax(&(0..PLACES).map(score).collect::<Vec<f64>>())
        };
        let nll = |seen: &[f64], step: usize| {
            let logit = |class: usize| (0..WIDTH).map(|c| w[class * WIDTH + c] * seen[c]).sum();
            -softmax(&(0..CLASSES).map(logit).collect::<Vec<f64>>())[TARGETS[2 * b + step] as usize].ln()
        };
        let asks = |seen: &[f64]| (0..WIDTH).map(|a| seen[a] + row(&given.queries[1], 0)[a]).collect::<Vec<f64>>();
        let mean = |p: &[f64]| {
            (0..WIDTH).map(|c| (0..PLACES).map(|j| p[j] * row(&given.values, j)[c]).sum()).collect::<Vec<f64>>()
        };
        let first = weights(&row(&given.queries[0], 0));
        if soft {
            let seen = mean(&first);
            loss += nll(&seen, 0) + if length > 1 { nll(&mean(&weights(&asks(&seen))), 1) } else { 0.0 };
            continue;
        }
        for (j, p) in first.iter().enumerate() {
            let seen = row(&given.values, j);
            let second = weights(&asks(&seen));
            let later = |(k, p): (usize, &f64)| p * nll(&row(&given.values, k), 1);
            let later: f64 = if length > 1 { second.iter().enumerate().map(later).sum() } else { 0.0 };
            loss += p * (nll(&seen, 0) + later);
        }
    }
    loss
}

fn exact_gradients(parameters: &[f64], given: &Given, soft: bool) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let moved = |at: usize, by: f64| {
        let mut parameters = parameters.to_vec();
        parameters[at] += by;
        exact(&parameters, given, soft)
    };
    (0..parameters.len()).map(|at| (moved(at, STEP) - moved(at, -STEP)) / (2.0 * STEP)).collect()
}

/// Mean and standard error of each component over many draws.
fn estimated(p: &Parameters<f64>, given: &Given, how: Reinforce) -> Vec<[f64; 2]> {
    let (machine, pool) = (Machine::new(1), Pool::new());
    let draws: Vec<Vec<f64>> = (0..DRAWS).map(|seed| draw(p, given, how, seed << 8, &machine, &pool)).collect();
    let count = DRAWS as f64;
    let of = |at: usize| {
        let mean = draws.iter().map(|draw| draw[at]).sum::<f64>() / count;
        let variance = draws.iter().map(|draw| (draw[at] - mean).powi(2)).sum::<f64>() / (count - 1.0);
        [mean, (variance / count).sqrt()]
    };
    (0..draws[0].len()).map(of).collect()
}

/// Whether every mean is within five standard errors. By chance, one of the eight components is not in about one of
/// 200,000 tests.
fn agrees(found: &[[f64; 2]], exact: &[f64]) -> bool {
    found.iter().zip(exact).all(|([mean, error], exact)| (mean - exact).abs() <= 5.0 * error + 1e-7)
}

#[test]
fn the_mean_of_many_draws_is_the_gradient_of_the_expectation() {
    let (p, given) = (parameters(&[&[WIDTH], &[CLASSES, WIDTH]]), given());
    let all: Vec<f64> = ["p0", "p1"].iter().flat_map(|name| p.get(p.find(name).unwrap()).to_vec()).collect();
    let hard = exact_gradients(&all, &given, false);
    // The result must not depend on the baseline.
    for baseline in [0.0, -1.1] {
        let found = estimated(&p, &given, Reinforce { weight: 1.0, expected: 0.0, baseline });
        assert!(agrees(&found, &hard), "{found:?}\n{hard:?}");
    }
    // Without the reward, the gradient through the choices is missing.
    let found = estimated(&p, &given, Reinforce { weight: 0.0, expected: 0.0, baseline: 0.0 });
    assert!(!agrees(&found, &hard), "{found:?}\n{hard:?}");
    assert!(found[..WIDTH].iter().all(|[mean, _]| *mean == 0.0));
}

/// Choices, values and gradients on a device are those of the CPU, up to its precision.
#[test]
fn a_device_draws_what_the_cpu_draws() {
    let (p, given) = (parameters(&[&[WIDTH], &[CLASSES, WIDTH]]), given());
    let Some(operations) = emulated() else { return };
    let (cpu, device, pool) = (Machine::new(1), Machine::new(1).on_cuda(operations), Pool::new());
    let how = Reinforce { weight: 1.0, expected: 0.5, baseline: -1.0 };
    for seed in 0..8 {
        // A deep copy, so that a device's changes do not leak out.
        let own = p.rounded::<f64>();
        let here = draw(&p, &given, how, seed << 8, &cpu, &pool);
        let there = draw(&own, &given, how, seed << 8, &device, &pool);
        let most = here.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        assert!(here.iter().zip(&there).all(|(a, b)| (a - b).abs() < 1e-5 * most), "{here:?}\n{there:?}");
    }
}

#[test]
fn half_of_the_sequences_take_the_expected_value() {
    let (p, given) = (parameters(&[&[WIDTH], &[CLASSES, WIDTH]]), given());
    let all: Vec<f64> = ["p0", "p1"].iter().flat_map(|name| p.get(p.find(name).unwrap()).to_vec()).collect();
    let [hard, soft] = [false, true].map(|soft| exact_gradients(&all, &given, soft));
    let both: Vec<f64> = hard.iter().zip(&soft).map(|(hard, soft)| 0.5 * (hard + soft)).collect();
    let found = estimated(&p, &given, Reinforce { weight: 1.0, expected: 0.5, baseline: -1.0 });
    assert!(agrees(&found, &both), "{found:?}\n{both:?}");
    assert!(!agrees(&found, &hard) && !agrees(&found, &soft));
}

/// The log-likelihood of every row is returned from a device, however many rows there are.
#[test]
fn a_device_says_how_likely_each_of_many_targets_was() {
    let Some(operations) = emulated() else { return };
    let p = parameters(&[&[CLASSES, WIDTH]]);
    let ids: Vec<u32> = (0..70).map(|row| if row % 9 == 4 { IGNORED } else { row % 3 }).collect();
    let of = |machine: &Machine| {
        let (own, pool) = (p.rounded::<f64>(), Pool::new());
        let mut gradients = Gradients::of(&own);
        let mut tape = Tape::training(&own, &mut gradients, &pool, machine, 1);
        let x = tape.constant(numbers(&[70, WIDTH], 5));
        let target = Target { ids: &ids, ignore: Some(IGNORED), smoothing: 0.0, scale: 1.0 };
        let (loss, rows) = tape.cross_entropy_of_rows(&x, own.find("p0").unwrap(), None, target);
        assert!((loss.read().nll + rows.iter().sum::<f64>()).abs() < 1e-3);
        rows
    };
    let (here, there) = (of(&Machine::new(1)), of(&Machine::new(1).on_cuda(operations)));
    assert!(here.iter().zip(&there).all(|(a, b)| (a - b).abs() < 1e-5), "{here:?}\n{there:?}");
    assert!(ids.iter().zip(&there).all(|(&id, &found)| (id == IGNORED) == (found == 0.0)), "{there:?}");
}
