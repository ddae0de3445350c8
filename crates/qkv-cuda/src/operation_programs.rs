//! The operations of models as text: the files and the kernels of the two programs that a device compiles for them.

use crate::driver::Source;
use crate::memory::Dtype;
use crate::operations::{MOST_HIGHEST, STAGED};
use crate::program::{element, kernel};

/// The files with which both programs begin.
const COMMON: [&str; 5] = [
    kernel!("general/element.cuh"),
    kernel!("general/philox.cuh"),
    kernel!("operations/common.cuh"),
    kernel!("operations/activations.cuh"),
    kernel!("operations/few_rows.cuh"),
];

/// The operations of models, with activations of this type.
pub(crate) fn operations(dtype: Dtype) -> Source {
    let files = [
        kernel!("operations/elementwise.cu"),
        kernel!("operations/norm.cu"),
        kernel!("operations/rows.cu"),
        kernel!("operations/decoding.cu"),
        kernel!("operations/batch_invariant.cu"),
        kernel!("operations/logits.cu"),
        kernel!("operations/loss.cu"),
        kernel!("operations/speech.cu"),
        kernel!("operations/recurrent.cu"),
        kernel!("operations/additive.cu"),
        kernel!("operations/images.cu"),
        kernel!("operations/optimizer.cu"),
    ];
    Source {
        name: format!("operations of models {dtype}"),
        cache_prefix: "operations",
        text: COMMON.concat() + &files.concat(),
        options: options(dtype),
        kernels: OPERATIONS,
    }
}

/// The operations on matrices in quantized blocks, which are compiled only when a model has some.
pub(crate) fn block_operations(dtype: Dtype) -> Source {
    Source {
        name: format!("operations on blocks {dtype}"),
        cache_prefix: "blocks",
        text: COMMON.concat() + kernel!("operations/blocks.cu"),
        options: options(dtype),
        kernels: &["few_rows_blocks", "few_rows_blocks_appended", "few_rows_blocks_gated", "embedding_blocks"],
    }
}

fn options(dtype: Dtype) -> Vec<String> {
    vec![
        "-std=c++17".into(),
        // Otherwise NVRTC 13.0 takes generic lambdas for host functions.
        "-default-device".into(),
        format!("-DELEMENT={}", element(dtype)),
        format!("-DMOST_HIGHEST={MOST_HIGHEST}"),
        format!("-DSTAGED={STAGED}"),
    ]
}

/// The kernels of [`operations`].
const OPERATIONS: &[&str] = &[
    "from_floats",
    "add",
    "add_floats",
    "add_widened",
    "scale_all",
    "scale_sequences",
    "activate",
    "activation_gradient",
    "residual",
    "gated",
    "gated_gradient",
    "rotate",
    "layer_norm",
    "layer_norm_gradient",
    "layer_norm_gradient_256",
    "layer_norm_gradient_512",
    "layer_norm_gradient_768",
    "layer_norm_gradient_1024",
    "rms_norm",
    "rms_norm_gradient",
    "rms_norm_gradient_256",
    "rms_norm_gradient_512",
    "rms_norm_gradient_768",
    "rms_norm_gradient_1024",
    "column_sums",
    "add_partials",
    "embedding",
    "gather_rows",
    "scatter_rows",
    "scatter_same",
    "copy_columns",
    "append_at",
    "reorder_rows",
    "next_token",
    "survey_logits",
    "draw_token",
    "few_rows_1",
    "few_rows_2",
    "few_rows_4",
    "few_rows_8",
    "few_rows_gated_1",
    "few_rows_gated_2",
    "few_rows_gated_4",
    "few_rows_gated_8",
    "few_rows_appended_1",
    "few_rows_appended_2",
    "few_rows_appended_4",
    "few_rows_appended_8",
    "many_rows",
    "unaligned_rows",
    "mean_rows",
    "mean_gradient",
    "cross_entropy",
    "cross_entropy_wide",
    "sum_losses",
    "distance",
    "place_waves",
    "row_products",
    "gru_cell",
    "gru_cell_gradient",
    "unfold2d",
    "unfold2d_gradient",
    "max_pool2d",
    "max_pool2d_gradient",
    "group_norm",
    "group_norm_gradient",
    "additive_attention",
    "additive_gradient_queries",
    "additive_gradient_keys",
    "gradient_squares",
    "gradient_norm",
    "adamw",
    "moving_average",
];
