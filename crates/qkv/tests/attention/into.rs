//! Calls from and into the caller's memory: the bits are those of the calls that allocate, whatever the strides.

use half::{bf16, f16};
use qkv::{
    Attention, Bias, Element, Features, GradientsMut, Inputs, Mask, OutputMut, OutputRef, Place, Scratch, Tensor,
    Upstream, View, ViewMut,
};

/// Memory for `[B, H, N, D]` as `[B, N, H, D]`, with a gap after each row.
struct SideBySide<T> {
    data: Vec<T>,
    shape: [usize; 4],
}

impl<T: Element> SideBySide<T> {
    fn new(shape: [usize; 4]) -> Self {
        let [b, h, n, d] = shape;
        SideBySide { data: vec![T::of_f64(f64::NAN); b * n * h * (d + 3) + 1], shape }
    }

    fn strides(&self) -> [isize; 4] {
        let [_, h, n, d] = self.shape;
        [n * h * (d + 3), d + 3, h * (d + 3), 1].map(|stride| stride as isize)
    }

    fn view_mut(&mut self) -> ViewMut<'_, T> {
        let (shape, strides) = (self.shape, self.strides());
        ViewMut::strided(&mut self.data, 1, shape, strides).unwrap()
    }

    fn view(&self) -> View<'_, T> {
        View::strided(&self.data, 1, self.shape, self.strides()).unwrap()
    }
}

fn same<T: Element>(found: &SideBySide<T>, expected: &Tensor<T, 4>, name: &str) {
    assert!(found.view().to_vec() == expected.data(), "{name} in {}", T::NAME);
}

fn backward_into_has_the_bits_of_backward<T: Element>() {
    let [q, d_out] = [1, 4].map(|seed| Tensor::<T, 4>::randn([2, 4, 150, 8], seed));
    let [k, v] = [2, 3].map(|seed| Tensor::<T, 4>::randn([2, 2, 150, 8], seed));
    let w = Tensor::<T, 2>::randn([8, 8], 5);
    let bias = Tensor::<T, 4>::randn([1, 4, 150, 150], 6);
    let table = Tensor::<T, 2>::randn([4, 9], 7);
    let numbers = |len, seed| Tensor::<T, 1>::randn([len], seed).into_data();
    let (sinks, scale) = (numbers(4, 8), numbers(4, 9));
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let plain = Inputs::new(&q, &k, &v);
    for (name, attention, inputs) in [
        ("causal", causal.clone().with_sinks(), plain.sinks(&sinks)),
        ("strided", causal.clone().mask(Mask::strided(8)).place(Place::End), plain),
        ("general", Attention::general(), plain.w(&w)),
        ("cosine", Attention::cosine().learned_scale().dropout(0.1), plain.scale(&scale).seed(3)),
        ("biased", causal.bias(Bias::tensor() + Bias::relative(4)).with_entropy(), plain.bias(&bias).table(&table)),
        ("linear", Attention::linear(Features::Elu).mask(Mask::causal()), plain),
    ] {
        let expected_out = attention.forward(inputs).unwrap();
        let d_entropy = expected_out.entropy.as_ref().map(|entropy| entropy.data().to_vec());
        let upstream = || match &d_entropy {
            Some(d) => Upstream::new(&d_out).entropy(d),
            None => Upstream::new(&d_out),
        };
        let expected = attention.backward(inputs, &expected_out, upstream()).unwrap();
        let scratch = Scratch::new();
        let mut values = SideBySide::<T>::new([2, 4, 150, 8]);
        let [mut lse, mut entropy] = [(); 2].map(|()| Tensor::<T::Acc, 4>::zeros([2, 4, 150, 1]).unwrap());
        let mut into = OutputMut::new(values.view_mut(), &mut lse);
        if attention.entropy {
            into = into.entropy(&mut entropy);
        }
        attention.forward_into(inputs, into, &scratch, 2).unwrap();
        same(&values, &expected_out.values, name);
        assert!(lse.data() == expected_out.lse.data(), "lse of {name}");
        let mut out = OutputRef::new(values.view(), lse.data());
        if attention.entropy {
            out = out.entropy(entropy.data());
        }
        let [mut d_q, mut d_k, mut d_v] = [q.shape(), k.shape(), v.shape()].map(SideBySide::<T>::new);
        let mut found = expected.clone();
        let nan = T::of_f64(f64::NAN);
        found.table.iter_mut().for_each(|table| table.data_mut().fill(nan));
        found.sinks.iter_mut().chain(&mut found.scale).for_each(|numbers| numbers.fill(nan));
        let optional = found.as_mut();
        let (mut d_w, mut d_bias) = (SideBySide::<T>::new([1, 1, 8, 8]), SideBySide::<T>::new(bias.shape()));
        let mut into = GradientsMut::new(d_q.view_mut(), d_k.view_mut(), d_v.view_mut());
        into.w = inputs.w.is_some().then(|| d_w.view_mut());
        into.bias = inputs.bias.is_some().then(|| d_bias.view_mut());
        (into.table, into.sinks, into.scale) = (optional.table, optional.sinks, optional.scale);
        attention.backward_into(inputs, out, upstream(), into, &scratch, 2).unwrap();
        for (found, expected, of) in
            [(&d_q, &expected.q, "d_q"), (&d_k, &expected.k, "d_k"), (&d_v, &expected.v, "d_v")]
        {
            same(found, expected, &format!("{of} of {name}"));
        }
        for (found, expected) in [(&d_w, &expected.w), (&d_bias, &expected.bias)] {
            expected.iter().for_each(|expected| same(found, expected, name));
        }
        assert!(found == expected, "{name}");
    }
}

#[test]
fn backward_into_strided_memory_has_the_bits_of_backward() {
    backward_into_has_the_bits_of_backward::<f32>();
    backward_into_has_the_bits_of_backward::<f64>();
    backward_into_has_the_bits_of_backward::<bf16>();
    backward_into_has_the_bits_of_backward::<f16>();
}

#[test]
fn memory_of_another_shape_and_for_inputs_that_are_not_there_is_refused() {
    let x = Tensor::<f32, 4>::randn([1, 2, 9, 4], 1);
    let attention = Attention::scaled_dot();
    let inputs = Inputs::new(&x, &x, &x);
    let out = attention.forward(inputs).unwrap();
    let refused = |shape: [usize; 4], sinks: bool, rows: usize| {
        let [mut q, mut k] = [(); 2].map(|()| Tensor::<f32, 4>::zeros([1, 2, 9, 4]).unwrap());
        let (mut v, mut numbers) = (Tensor::<f32, 4>::zeros(shape).unwrap(), [0.0; 2]);
        let mut into = GradientsMut::new(&mut q, &mut k, &mut v);
        into.sinks = sinks.then_some(&mut numbers);
        let out = OutputRef::new(&out.values, &out.lse.data()[..rows]);
        let result = attention.backward_into(inputs, out, Upstream::new(&x), into, &Scratch::new(), 1);
        result.unwrap_err().to_string()
    };
    assert_eq!(refused([1, 2, 9, 5], false, 18), "`d_v` has shape [1, 2, 9, 5], expected [1, 2, 9, 4]");
    assert_eq!(refused([1, 2, 9, 4], true, 18), "`d_sinks` was given, but the call has no such input");
    assert_eq!(refused([1, 2, 9, 4], false, 17), "`lse` has shape [17], expected [1, 2, 9]");
    let hard = Attention::dot().hard();
    let chosen = hard.forward(inputs).unwrap();
    let mut gradients = hard.backward(inputs, &chosen, Upstream::new(&x)).unwrap();
    let out = OutputRef::new(&chosen.values, chosen.lse.data());
    let into = gradients.as_mut();
    assert!(hard.backward_into(inputs, out, Upstream::new(&x), into, &Scratch::new(), 1).is_err());
}
