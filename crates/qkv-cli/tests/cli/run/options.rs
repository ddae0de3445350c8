//! Every typed option does what the library's description of the same name does.

use crate::run::program::{Input, noise, qkv};
use qkv::reference::Reference;
use qkv::{Attention, Bias, BigBird, Inputs, Mask, Place, Score};

/// Checks that typed options match a description: output and log-sum-exp against the definition in f64.
fn holds(typed: &str, described: Attention) {
    let [q, k, v] = qkv::<f32>();
    let mut words = typed.split(' ').skip_while(|word| *word != "--seed").skip(1);
    let seed = words.next().map_or(0, |seed| seed.parse().unwrap());
    let truth = Reference::<f64>::exact().forward(&described, Inputs::new(&q, &k, &v).seed(seed)).unwrap();
    let written = Input::of(&q, &k, &v).folder().run(typed);
    println!("{typed}");
    assert_eq!(written.names(), ["lse", "out"]);
    written["out"].is(&[2, 4, 7, 8], truth.output.values.data(), 2e-5);
    written["lse"].is(&[2, 4, 7], truth.output.lse.data(), 2e-5);
}

#[test]
fn scores_that_need_no_tensors_are_the_librarys() {
    holds("", Attention::scaled_dot());
    for score in [Score::Dot, Score::ScaledDot, Score::Cosine, Score::Distance] {
        holds(&format!("--score {}", score.name()), Attention::new(score));
    }
}

#[test]
fn general_and_additive_scores_take_their_tensors_and_two_widths() {
    let (q, k, v) = (noise::<f32, 4>([1, 2, 3, 4], 1), noise([1, 2, 5, 6], 2), noise([1, 2, 5, 2], 3));
    let (w, w_q, w_k, v_score) = (noise([4, 6], 4), noise([7, 4], 5), noise([7, 6], 6), noise::<f32, 1>([7], 7));
    let file = Input::of(&q, &k, &v);
    let definition = Reference::<f64>::exact();

    let truth = definition.forward(&Attention::general(), Inputs::new(&q, &k, &v).w(&w)).unwrap();
    let written = file.clone().tensor("w", &w).folder().run("--score general");
    written["out"].is(&[1, 2, 3, 2], truth.output.values.data(), 2e-5);

    let inputs = Inputs::new(&q, &k, &v).w_q(&w_q).w_k(&w_k).v_score(v_score.data());
    let truth = definition.forward(&Attention::additive(), inputs).unwrap();
    let file = file.tensor("w_q", &w_q).tensor("w_k", &w_k).tensor("v_score", &v_score);
    let written = file.folder().run("--score additive");
    written["out"].is(&[1, 2, 3, 2], truth.output.values.data(), 2e-5);
}

#[test]
fn what_comes_on_top_of_a_score_is_the_librarys() {
    holds("--scale -0.7", Attention::scaled_dot().scale(-0.7));
    holds("--temperature 0.5", Attention::scaled_dot().temperature(0.5));
    holds("--softcap 1.5", Attention::scaled_dot().softcap(1.5));
    holds("--alibi --place end", Attention::scaled_dot().bias(Bias::alibi()).place(Place::End));
    holds(
        "--score dot --scale 0.3 --temperature 2 --softcap 3 --alibi",
        Attention::dot().scale(0.3).temperature(2.0).softcap(3.0).bias(Bias::alibi()),
    );
}

#[test]
fn masks_and_places_are_the_librarys() {
    let masked = |mask| Attention::scaled_dot().mask(mask);
    holds("--causal start", masked(Mask::causal()));
    holds("--causal end", masked(Mask::causal()).place(Place::End));
    holds("--causal end --place end", masked(Mask::causal()).place(Place::End));
    holds("--causal start --place 1", masked(Mask::causal()).place(Place::Offset(1)));
    holds("--causal start --place -2", masked(Mask::causal()).place(Place::Offset(-2)));
    holds("--window 2,1", masked(Mask::window(2, 1)));
    holds("--window 2,1 --place end", masked(Mask::window(2, 1)).place(Place::End));
    holds("--pattern strided:3", masked(Mask::strided(3)));
    holds("--pattern fixed:4,1", masked(Mask::fixed(4, 1)));
    holds("--pattern longformer:2,1", masked(Mask::longformer(2, [0])));
    let bigbird = BigBird { block: 2, window: 1, globals: 1, random: 1, seed: 5 };
    holds("--pattern bigbird:2,1,1,1,5", masked(Mask::bigbird(bigbird)));
}

#[test]
fn a_key_has_to_pass_every_rule_that_is_given() {
    let all = Mask::causal() & Mask::window(4, 0) & Mask::strided(3);
    let typed = "--causal end --window 4,0 --pattern strided:3";
    holds(typed, Attention::scaled_dot().mask(all).place(Place::End));
}

#[test]
fn dropout_drops_what_the_library_drops() {
    holds("--dropout 0.3", Attention::scaled_dot().dropout(0.3));
    holds("--dropout 0.3 --seed 18446744073709551615", Attention::scaled_dot().dropout(0.3));
}

#[test]
fn weights_sum_to_one_and_make_the_output() {
    let [q, k, v] = qkv::<f32>();
    let folder = Input::of(&q, &k, &v).folder();
    for engine in ["exact", "reference"] {
        let written = folder.run(&format!("--weights --causal end --engine {engine}"));
        let weights = &written["weights"];
        assert_eq!(weights.shape, [2, 4, 7, 9]);
        for (row, weights) in weights.data.chunks(9).enumerate() {
            assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-6);
            let (b, h) = (row / 28, row / 7 % 4);
            for x in 0..8 {
                let out: f64 = (0..9).map(|j| weights[j] * f64::from(v[[b, h / 2, j, x]])).sum();
                assert!((out - written["out"].data[row * 8 + x]).abs() < 1e-5);
            }
        }
    }
}

#[test]
fn both_engines_agree() {
    let [q, k, v] = qkv::<f32>();
    let folder = Input::of(&q, &k, &v).tensor("d_out", &noise::<f32, 4>([2, 4, 7, 8], 4)).folder();
    let choices = "--weights --softcap 2 --alibi --causal end --dropout 0.2 --seed 3";
    let [auto, exact, reference] =
        ["auto", "exact", "reference"].map(|engine| folder.run(&format!("{choices} --engine {engine}")));
    assert_eq!(auto, exact);
    assert_eq!(exact.names(), reference.names());
    for name in exact.names() {
        exact[name].is(&reference[name].shape, &reference[name].data, 2e-5);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| noise::<f32, 4>([1, 2, 300, 16], seed));
    let bias = noise::<f32, 2>([300, 300], 5);
    let folder = Input::of(&q, &k, &v).tensor("d_out", &d_out).tensor("bias", &bias).folder();
    let [one, three, all] = ["--threads 1", "--threads 3", ""].map(|threads| {
        folder.run(&format!("--causal start --weights {threads}"));
        folder.bytes("out.safetensors")
    });
    assert!(one == three && one == all);
}
