//! Surveys and draws of logits on a device agree with those on the CPU.

use super::devices::devices;
use qkv_cuda::operations::{Drawing, MOST_HIGHEST, NO_TOKEN};
use qkv_nn::{Activation, Init, Machine, Parameters, Pool, Tape, Tensor};
use qkv_simd::logits::survey;
use qkv_simd::{Isa, philox};

/// Logits that are exact in bf16.
fn logits(classes: usize, seed: usize, levels: usize) -> Vec<f32> {
    (0..classes)
        .map(|x| ((x + 13 * seed).wrapping_mul(2_654_435_761) >> 9) % levels)
        .map(|x| x as f32 / 8.0 - 9.0)
        .collect()
}

#[test]
fn a_survey_on_a_device_is_that_of_the_cpu() {
    for operations in devices() {
        let machine = Machine::new(1).on_cuda(operations);
        // One class, a few, more than there are threads, so many equal logits that they are not collected, and all
        // equal.
        for (classes, levels) in [(1, 9), (7, 3), (1000, 200), (5003, 250), (9000, 2), (3000, 1)] {
            for most in [1, 10, MOST_HIGHEST] {
                let rows: Vec<Vec<f32>> = (0..3).map(|seed| logits(classes, seed, levels)).collect();
                let (parameters, pool) = (Parameters::<f32>::new(), Pool::new());
                let tape = Tape::inference(&parameters, &pool, &machine);
                let found = tape.survey(&tape.constant(Tensor::new(rows.concat(), &[3, 1, classes])), most);
                for (found, row) in found.iter().zip(&rows) {
                    let expected = survey(Isa::best(), row, most);
                    assert_eq!(found.best, expected.best, "{most} of {classes} with {levels} levels");
                    let off = (found.log_sum_exp - expected.log_sum_exp).abs();
                    assert!(found.is_finite && off < 2e-6 * (9.0 + expected.log_sum_exp.abs()), "{off}");
                }
            }
        }
        let mut row = logits(3000, 1, 100);
        row[2500] = f32::NAN;
        let (parameters, pool) = (Parameters::<f32>::new(), Pool::new());
        let tape = Tape::inference(&parameters, &pool, &machine);
        let found = tape.survey(&tape.constant(Tensor::new(row, &[1, 3000])), 5);
        assert!(!found[0].is_finite && found[0].best.is_empty());
        let more = logits(3000, 1, 100);
        let found = tape.survey(&tape.constant(Tensor::new(more.clone(), &[1, 3000])), MOST_HIGHEST + 1);
        assert_eq!(found, [survey(Isa::best(), &more, MOST_HIGHEST + 1)]);
    }
}

#[test]
fn a_survey_of_a_linear_layer_has_the_bits_of_its_logits() {
    let (rows, classes, width) = (5, 1300, 24);
    let mut parameters = Parameters::<f32>::new();
    let w = parameters.add("w", &[classes, width], Init::Xavier, 3);
    let b = parameters.add("b", &[classes], Init::Uniform(1.0), 5);
    let x = logits(rows * width, 3, 140);
    for packed in [false, true] {
        if packed {
            parameters.pack_for_inference();
        }
        for machine in [Machine::new(1), Machine::new(2), Machine::new(1).int8(true)] {
            let pool = Pool::new();
            let mut tape = Tape::inference(&parameters, &pool, &machine);
            let x = tape.constant(Tensor::new(x.clone(), &[rows, 1, width]));
            for b in [None, Some(b)] {
                let logits = tape.linear(&x, w, b, Activation::None, 0.0);
                let expected: Vec<_> =
                    logits.value().data().chunks(classes).map(|row| survey(Isa::best(), row, 7)).collect();
                assert_eq!(tape.survey_linear(&x, w, b, 7), expected, "{packed}");
            }
        }
    }
}

/// The token drawn by a random number in [0, 1], computed by sorting all tokens.
fn drawn(row: &[f32], (top_k, top_p, min_p): (usize, f64, f64), temperature: f64, share: f64) -> u32 {
    let mut order: Vec<usize> = (0..row.len()).collect();
    // Vocabulary order is kept if nothing is cut off.
    if top_k > 0 || top_p < 1.0 || min_p > 0.0 {
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    }
    let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |at: usize| (f64::from(row[at] - highest) / temperature).exp();
    let sum = |order: &[usize]| order.iter().map(|&at| weight(at)).sum::<f64>();
    order.truncate(if top_k > 0 { top_k } else { row.len() });
    let total = sum(&order);
    let enough = (0..order.len()).find(|&at| sum(&order[..=at]) >= top_p * total);
    order.truncate(enough.map_or(order.len(), |at| at + 1));
    order.retain(|&at| weight(at) >= min_p);
    let reached = (0..order.len()).find(|&at| sum(&order[..=at]) >= share * sum(&order));
    order[reached.unwrap_or(order.len() - 1)] as u32
}

#[test]
fn tokens_are_drawn_as_the_definition_says() {
    for operations in devices() {
        let (rows, classes, room) = (6, 300, 100);
        let row: Vec<f32> = (0..classes).map(|x| (x * 7 % 250) as f32 / 64.0).collect();
        let (parameters, pool) = (Parameters::<f32>::new(), Pool::new());
        let machine = Machine::new(1).on_cuda(operations.clone());
        let mut tape = Tape::inference(&parameters, &pool, &machine);
        let logits = tape.constant(Tensor::new(row.repeat(rows), &[rows, 1, classes]));
        for cuts in [(0, 1.0, 0.0), (9, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.6), (30, 0.9, 0.3), (400, 0.8, 0.0)] {
            let (batch, draws) = (operations.decode_batch(rows, room), operations.draws(rows));
            let texts: Vec<u32> = (0..rows as u32).map(|row| 3 + 5 * row).collect();
            operations.set_draws(&draws, &texts, &vec![2; rows]);
            for step in 2..5 {
                tape.draw_tokens(&logits, &batch, &draws, Drawing::new(0.8, cuts.1, cuts.2, cuts.0, 3));
                let ids = operations.read_scalars::<u32>(batch.ids());
                for (&text, id) in texts.iter().zip(ids) {
                    let [word, ..] = philox::block([text, 0, step, 0x7361_6d70], 3);
                    let share = (f64::from(word) + 0.5) / 4_294_967_296.0;
                    assert_eq!(id, drawn(&row, cuts, 0.8, share), "{cuts:?}, text {text}, step {step}");
                }
            }
            assert_eq!(operations.read_scalars::<u32>(batch.positions()), vec![3; rows]);
        }
    }
}

#[test]
fn tokens_of_flat_rows_are_drawn_as_the_definition_says() {
    for operations in devices() {
        // More candidates than are sorted, many of them equal.
        let (rows, classes) = (3, 5 * MOST_HIGHEST);
        let (parameters, pool) = (Parameters::<f32>::new(), Pool::new());
        let machine = Machine::new(1).on_cuda(operations.clone());
        let mut tape = Tape::inference(&parameters, &pool, &machine);
        for (levels, steepness) in [(250, 128.0), (3, 2.0), (1, 1.0)] {
            let row: Vec<f32> = (0..classes).map(|x| (x * 7 % levels) as f32 / steepness).collect();
            let logits = tape.constant(Tensor::new(row.repeat(rows), &[rows, 1, classes]));
            for cuts in [(0, 0.93, 0.0), (700, 1.0, 0.0), (700, 0.8, 0.0), (0, 0.9, 0.3), (0, 1.0, 0.2)] {
                let (batch, draws) = (operations.decode_batch(rows, 8), operations.draws(rows));
                let texts: Vec<u32> = (0..rows as u32).collect();
                operations.set_draws(&draws, &texts, &vec![0; rows]);
                tape.draw_tokens(&logits, &batch, &draws, Drawing::new(1.3, cuts.1, cuts.2, cuts.0, 8));
                for (&text, id) in texts.iter().zip(operations.read_scalars::<u32>(batch.ids())) {
                    let [word, ..] = philox::block([text, 0, 0, 0x7361_6d70], 8);
                    let share = (f64::from(word) + 0.5) / 4_294_967_296.0;
                    assert_eq!(id, drawn(&row, cuts, 1.3, share), "{levels} levels, {cuts:?}, text {text}");
                }
            }
        }
        let mut row = vec![0.0; classes];
        row[7] = f32::INFINITY;
        let logits = tape.constant(Tensor::new(row, &[1, 1, classes]));
        let (batch, draws) = (operations.decode_batch(1, 8), operations.draws(1));
        tape.draw_tokens(&logits, &batch, &draws, Drawing::new(1.0, 0.9, 0.0, 0, 3));
        assert_eq!(operations.read_scalars::<u32>(batch.ids()), [NO_TOKEN]);
    }
}
