//! Errors and their messages: without a GPU, and from plans that never launch.

use qkv::{Attention, Inputs, Mask, Place, Tensor};
use qkv_cuda::{Cuda, Dtype, Error, Outputs, PlanOptions, Stream, Strided, Tensors, Vector, Workspace};
use std::io::Write;

/// The emulation; without a compiler, prints why.
fn emulated() -> Option<Cuda> {
    Cuda::emulated().map_err(|error| drop(writeln!(std::io::stderr(), "skipped: {error}"))).ok()
}

fn tensors(n: usize, m: usize, d: usize) -> Tensors {
    let of = |len| Strided::contiguous(4096, [1, 2, len, d]);
    Tensors::new(of(n), of(m), of(m))
}

fn plan(attention: &Attention, tensors: &Tensors) -> Option<Result<qkv_cuda::Plan, Error>> {
    emulated().map(|cuda| cuda.plan(attention, Dtype::F32, Place::Start, tensors, PlanOptions::default()))
}

#[test]
fn without_a_gpu_the_error_names_what_is_missing() {
    match Cuda::new(0) {
        Ok(cuda) => assert!(!cuda.device().name.is_empty()),
        Err(error @ Error::NoDriver { .. }) => {
            assert!(error.to_string().contains("driver"), "{error}");
            assert!(error.hint().unwrap().contains("--device cuda"));
        }
        Err(error) => assert!(matches!(error, Error::NoDevice { .. } | Error::TooOld { .. }), "{error}"),
    }
    if let Err(error) = Cuda::new(1000) {
        assert!(matches!(error, Error::NoDriver { .. } | Error::NoDevice { number: 1000, .. }), "{error}");
    }
}

#[test]
fn unsupported_descriptions_name_the_cpu() {
    let dot = Attention::scaled_dot;
    for attention in [Attention::cosine(), Attention::distance(), dot().top_k(3), dot().sparsemax(), dot().hard()] {
        let Some(refused) = plan(&attention, &tensors(8, 8, 16)) else { return };
        let refused = refused.unwrap_err();
        assert!(matches!(refused, Error::CpuOnly { .. }), "{refused}");
        assert!(refused.to_string().contains("CPU"), "{refused}");
    }
    let wide = plan(&dot(), &tensors(8, 8, 300)).unwrap().unwrap_err();
    assert!(wide.to_string().contains("300"), "{wide}");
    let x = Tensor::<f64, 4>::randn([1, 1, 4, 4], 1);
    let refused = emulated().unwrap().forward(&dot(), Inputs::new(&x, &x, &x)).unwrap_err();
    assert!(refused.to_string().contains("`f64`"), "{refused}");
}

#[test]
fn shapes_are_refused_with_the_errors_of_qkv() {
    let mut wrong = tensors(8, 8, 16);
    wrong.v.shape[2] = 7;
    let Some(refused) = plan(&Attention::scaled_dot(), &wrong) else { return };
    assert!(matches!(refused, Err(Error::Refused(qkv::Error::Shape { tensor: "v", .. }))), "{refused:?}");
    let missing = plan(&Attention::scaled_dot().mask(Mask::lengths()), &tensors(8, 8, 16)).unwrap();
    assert!(matches!(missing, Err(Error::Refused(qkv::Error::Missing { tensor: "lengths", .. }))), "{missing:?}");
    let mut unused = tensors(8, 8, 16);
    unused.sinks = Some(Vector::new(4096, 2));
    let unused = plan(&Attention::scaled_dot(), &unused).unwrap();
    assert!(matches!(unused, Err(Error::Refused(qkv::Error::Unused { tensor: "sinks", .. }))), "{unused:?}");
}

#[test]
fn a_plan_reports_its_workspace_and_refuses_less() {
    let Some(cuda) = emulated() else { return };
    let given = tensors(1, 2000, 16);
    let plan = cuda.plan(&Attention::scaled_dot(), Dtype::F32, Place::End, &given, PlanOptions::default()).unwrap();
    assert_eq!(plan.forward_kernel(), "general f32 in 4 splits");
    assert!(plan.forward_workspace() >= 4 * 2 * 16 * 4);
    let out = Outputs::new(Strided::contiguous(4096, [1, 2, 1, 16]), Vector::new(4096, 2));
    let none = Workspace::new(0, 0);
    // SAFETY: it is rejected before any memory is accessed.
    let refused = unsafe { plan.forward(&given, &out, none, Stream(0)) }.unwrap_err();
    assert!(refused.to_string().contains("workspace"), "{refused}");
    let other = tensors(2, 2000, 16);
    // SAFETY: likewise.
    let refused = unsafe { plan.forward(&other, &out, none, Stream(0)) }.unwrap_err();
    assert!(refused.to_string().contains("the plan was made for"), "{refused}");
    let without = tensors(1, 2000, 16);
    // SAFETY: likewise.
    let refused = unsafe { plan.rectangle(&without, out.lse, [0, 0], 0..1, 0..1, Vector::new(4096, 1), Stream(0)) };
    assert!(refused.unwrap_err().to_string().contains("`PlanOptions::weights`"));
}
