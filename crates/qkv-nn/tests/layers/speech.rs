//! Operations for training speech models: guided attention agrees with its definition, and its gradients and those of
//! the distance loss and scaled positions agree with finite differences.

use super::gradients::{check, numbers, parameters};
use qkv::Attention;
use qkv_nn::layers::{Builder, ScaledPositions};
use qkv_nn::{AttendOptions, Expected, Gradients, Guide, Heads, Machine, Parameters, Pool, Tape, Tensor};

const HEADS: Heads = Heads { query: 2, key: 2 };

#[test]
fn guidance_is_the_mean_penalty_of_all_weights_by_its_definition() {
    let (key_lengths, query_lengths) = ([5, 3], [7, 4]);
    let (q, k) = (numbers(&[2, 7, 8], 1), numbers(&[2, 5, 8], 2));
    let attention = Attention::scaled_dot();
    // Along the diagonal, and along places that stall and jump.
    let led: Vec<f32> = (0..14).map(|at| [0.1, 0.1, 0.15, 0.7, 0.72, 0.9, 1.0][at * 3 % 7]).collect();
    for (width, led) in [0.05, 0.2, 0.4, 1.5].into_iter().flat_map(|width| [(width, None), (width, Some(&led))]) {
        let guide = Guide { weight: 3.0, width };
        let (p, pool, machine) = (parameters(&[]), Pool::new(), Machine::new(2));
        let mut gradients = Gradients::of(&p);
        let mut tape = Tape::training(&p, &mut gradients, &pool, &machine, 1);
        let [q, k] = [&q, &k].map(|x| tape.input(x.clone()));
        let options = AttendOptions {
            heads: HEADS,
            key_lengths: Some(&key_lengths),
            query_lengths: Some(&query_lengths),
            ..AttendOptions::new(&attention)
        };
        led.into_iter().for_each(|led| tape.lead(led.clone()));
        tape.guide(&q, &k, guide, &options).unwrap();
        let (mut total, mut rows) = (0.0, 0);
        for (b, (&m, &n)) in key_lengths.iter().zip(&query_lengths).enumerate() {
            for (h, i) in (0..2).flat_map(|h| (0..n).map(move |i| (h, i))) {
                let row = |x: &qkv_nn::Tensor<f64>, length: usize, at: usize| {
                    x.data()[((b * length + at) * 2 + h) * 4..][..4].to_vec()
                };
                let query = row(q.value(), 7, i);
                let score = |j: usize| query.iter().zip(row(k.value(), 5, j)).map(|(a, b)| a * b).sum::<f64>() / 2.0;
                let weights: Vec<f64> = (0..m).map(|j| score(j).exp()).collect();
                let place = |at: usize, length: usize| (at as f64 + 0.5) / length as f64;
                let there = led.map_or(place(i, n), |led| f64::from(led[b * 7 + i]));
                let penalties = (0..m).map(|j| weights[j] * guide.penalty(there, place(j, m)));
                total += penalties.sum::<f64>() / weights.iter().sum::<f64>();
                rows += 1;
            }
        }
        let expected = 3.0 * total / f64::from(rows);
        let found = tape.penalty().read();
        assert!((found - expected).abs() < 3e-6, "{width}: {found} and {expected}");
    }
}

#[test]
fn the_gradient_of_guidance_reaches_queries_and_keys() {
    let attention = Attention::scaled_dot();
    let places = [None, Some([0.1, 0.15, 0.8, 0.9, 0.0, 0.5, 0.6, 0.0])];
    for (name, places) in ["guide", "guide that leads"].into_iter().zip(places) {
        let inputs = [numbers(&[2, 4, 32], 1), numbers(&[2, 3, 32], 2)];
        check(name, &parameters(&[]), &inputs, &|tape, x| {
            if let Some(places) = places {
                tape.lead(places.to_vec());
            }
            let options = AttendOptions {
                heads: HEADS,
                key_lengths: Some(&[3, 2]),
                query_lengths: Some(&[4, 3]),
                ..AttendOptions::new(&attention)
            };
            tape.guide(&x[0], &x[1], Guide { weight: 2.0, width: 0.2 }, &options).unwrap();
            (None, 0.0)
        });
    }
}

#[test]
fn numbers_are_pulled_to_where_they_should_be() {
    let there = numbers(&[2, 3, 4], 8);
    let counted = [true, true, false, true, false, true];
    check("distance", &parameters(&[]), &[numbers(&[2, 3, 4], 3)], &|tape, x| {
        let expected = Expected { values: &there, counted: &counted, scale: 1.0 };
        (None, tape.distance_loss(&x[0], expected).read().nll)
    });
    let p = parameters(&[]);
    let (pool, machine) = (Pool::new(), Machine::new(1));
    let mut tape = Tape::inference(&p, &pool, &machine);
    let x = tape.constant(there.clone());
    let mut loss = |values: &Tensor<f64>| {
        let found = tape.distance_loss(&x, Expected { values, counted: &counted, scale: 1.0 }).read();
        assert_eq!((found.rows, found.smoothed), (4, found.nll));
        found.nll
    };
    assert_eq!(loss(&there), 0.0);
    let shifted = Tensor::new(there.data().iter().map(|x| x + 2.0).collect(), there.shape());
    assert!((loss(&shifted) - 4.0 * (2.0 + 4.0)).abs() < 1e-12);
}

#[test]
fn scaled_positions_are_added_and_their_factors_trained() {
    let mut parameters = Parameters::<f64>::new();
    let positions = ScaledPositions::new(&mut Builder::new(&mut parameters, 1).at("positions"), 9, 6);
    assert_eq!(positions.max_len(), 9);
    check("scaled positions", &parameters, &[numbers(&[2, 3, 6], 4)], &|tape, x| {
        (Some(positions.add(tape, &x[0], 5)), 0.0)
    });
}

#[test]
fn places_between_positions_lie_between_them() {
    let mut parameters = Parameters::<f64>::new();
    let positions = ScaledPositions::in_parts(&mut Builder::new(&mut parameters, 1).at("positions"), 9, 4, 6);
    assert_eq!(positions.max_len(), 9);
    let places = [5.0, 6.0, 7.0, 0.5, 0.8, 8.9];
    check("places", &parameters, &[numbers(&[2, 3, 6], 4)], &|tape, x| {
        (Some(positions.add_at(tape, &x[0], &places)), 0.0)
    });
    let (pool, machine) = (Pool::new(), Machine::new(1));
    let mut tape = Tape::inference(&parameters, &pool, &machine);
    let x = tape.constant(Tensor::new(vec![0.0; 36], &[2, 3, 6]));
    let found = positions.add_at(&mut tape, &x, &places).value().data().to_vec();
    let whole = positions.add(&mut tape, &x, 5).value().data().to_vec();
    assert_eq!(found[..18], whole[..18], "whole places are positions");
    // The first channel is √2 times the sine of the place; 0.8 is rounded down to three quarters.
    for (row, place) in [(3, 0.5f64), (4, 0.75), (5, 8.75)] {
        assert!((found[row * 6] - 2f64.sqrt() * place.sin()).abs() < 1e-6, "{} of {place}", found[row * 6]);
    }
}

#[test]
fn a_tape_that_is_a_share_of_a_step_has_that_share_of_the_guidance() {
    let attention = Attention::scaled_dot();
    let [q, k] = [numbers(&[1, 4, 8], 1), numbers(&[1, 3, 8], 2)];
    let guided = |share: f64| {
        let (p, pool, machine) = (parameters(&[]), Pool::new(), Machine::new(1));
        let mut gradients = Gradients::of(&p);
        let mut tape = Tape::training(&p, &mut gradients, &pool, &machine, 1).share(share);
        let [q, k] = [&q, &k].map(|x| tape.input(x.clone()));
        let options = AttendOptions { heads: HEADS, ..AttendOptions::new(&attention) };
        tape.guide(&q, &k, Guide { weight: 2.0, width: 0.2 }, &options).unwrap();
        let penalty = tape.penalty().read();
        tape.backward();
        (penalty, tape.gradient(&q).unwrap().data().to_vec())
    };
    let (whole, half) = (guided(1.0), guided(0.5));
    assert!(whole.0 > 0.1 && whole.0 == 2.0 * half.0);
    assert!(whole.1.iter().zip(&half.1).all(|(whole, half)| *whole == 2.0 * half));
}
