//! The guide: pages whose code runs as tests.
//!
//! - [What attention does](what_attention_does): the subject from a single word up.
//! - [Which attention, and when](choosing): what each mechanism is good for, costs and gives up.
//! - [Linear attention](linear_attention): features, states, and the error of FAVOR+.
//! - [Coming from PyTorch](coming_from_pytorch): `scaled_dot_product_attention`, `MultiheadAttention` and
//!   FlexAttention.
//! - [Mechanisms](mechanisms): time and memory of every mechanism against length.
//!
//! In Chinese: [what attention does](zh::what_attention_does), [choosing](zh::choosing),
//! [linear attention](zh::linear_attention).
//!
//! The pages are those of the repository's `docs/`, by links in `crates/qkv/docs` that `cargo package` follows. Their
//! links to each other are reference links; the definitions here come first and win. A picture has no file beside these
//! pages: its reference is an empty image here, and the picture itself follows the page.

#[doc = "[中文]: zh::what_attention_does\n\n"]
#[doc = include_str!("../docs/what-attention-does.md")]
pub mod what_attention_does {}

#[doc = "[中文]: zh::choosing\n[The table of mechanisms]: mechanisms\n[linear attention]: linear_attention\n\n"]
#[doc = include_str!("../docs/choosing.md")]
pub mod choosing {}

#[doc = "[中文]: zh::linear_attention"]
#[doc = "[favor-error]: data:image/svg+xml,%3Csvg%20xmlns='http://www.w3.org/2000/svg'%20width='0'/%3E\n\n"]
#[doc = include_str!("../docs/linear-attention.md")]
#[doc = "\n"]
#[doc = include_str!("../docs/favor-error.svg")]
pub mod linear_attention {}

#[doc = include_str!("../docs/coming-from-pytorch.md")]
pub mod coming_from_pytorch {}

#[doc = include_str!("../docs/mechanisms.md")]
pub mod mechanisms {}

/// The guide in Chinese.
pub mod zh {
    #[doc = "[English]: super::what_attention_does\n\n"]
    #[doc = include_str!("../docs/what-attention-does.zh-CN.md")]
    pub mod what_attention_does {}

    #[doc = "[English]: super::choosing\n\n"]
    #[doc = include_str!("../docs/choosing.zh-CN.md")]
    pub mod choosing {}

    #[doc = "[English]: super::linear_attention"]
    #[doc = "[favor-error]: data:image/svg+xml,%3Csvg%20xmlns='http://www.w3.org/2000/svg'%20width='0'/%3E\n\n"]
    #[doc = include_str!("../docs/linear-attention.zh-CN.md")]
    #[doc = "\n"]
    #[doc = include_str!("../docs/favor-error.svg")]
    pub mod linear_attention {}
}
