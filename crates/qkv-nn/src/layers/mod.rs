//! Layers. A layer holds handles and is cheap to clone; the elements are in [`Parameters`](crate::Parameters), under
//! names that the layer chooses.
//!
//! ```
//! use qkv::{Attention, Mask};
//! use qkv_nn::layers::{AttentionConfig, Builder, MultiHead};
//! use qkv_nn::{Heads, Machine, Parameters, Pool, Tape, Tensor};
//! let mut parameters = Parameters::<f32>::new();
//! let config = AttentionConfig::new(Attention::scaled_dot().mask(Mask::causal()), Heads { query: 4, key: 2 });
//! let layer = MultiHead::new(&mut Builder::new(&mut parameters, 1).at("self_attn"), 64, &config)?;
//! assert!(parameters.find("self_attn.q_proj.weight").is_some());
//!
//! let (pool, machine) = (Pool::new(), Machine::new(1));
//! let mut tape = Tape::inference(&parameters, &pool, &machine);
//! let x = tape.constant(Tensor::new(vec![0.1; 2 * 7 * 64], &[2, 7, 64])); // (B, N, C)
//! let y = layer.forward(&mut tape, &x, &x, None, None, None)?;
//! assert_eq!(y.shape(), [2, 7, 64]);
//! # Ok::<(), qkv::Error>(())
//! ```

mod attention_pool;
mod block;
mod builder;
mod conv1d;
mod conv2d;
mod embedding;
mod feed_forward;
mod gru;
pub(crate) mod half_rows;
mod kv_cache;
mod linear;
mod multi_head;
mod norm;
mod recurrent_attention;
mod scaled_positions;

pub use attention_pool::AttentionPool;
pub use block::{Block, BlockConfig, NormPlace};
pub use builder::Builder;
pub use conv1d::Conv1d;
pub use conv2d::{Conv2d, GroupNorm};
pub use embedding::{Embedding, PositionKind};
pub use feed_forward::{FeedForward, FeedKind};
pub use gru::Gru;
pub use kv_cache::KvCache;
pub use linear::Linear;
pub use multi_head::{AttentionConfig, MultiHead};
pub use norm::{Norm, NormKind};
pub use recurrent_attention::{AttentionStyle, RecurrentAttention, RecurrentMemory};
pub use scaled_positions::ScaledPositions;
