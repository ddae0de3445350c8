// The fixed point in which dq is summed: the scale of a row, from a bound on its elements and on every partial sum of
// them.
//
// |dq| ≤ max|k| · Σ|ds|, ds = p (dp − delta), Σp ≤ 1, and |dp| = |d_out · v| ≤ |d_out| √dv max|v|, times the dropout
// scale: Σ|ds| ≤ |d_out| √dv max|v| + |delta|, with delta as the main kernel subtracts it, d_lse included.
#pragma once

// `square` is |d_out|², `most` the largest key and value of the head, `sum` is out · d_out.
INLINE float dq_row_scale(float square, int width, float kept_scale, float2 most, float sum, float d_lse) {
    float of_values = __fmul_rn(__fmul_rn(kept_scale, sqrtf(__fmul_rn(square, (float)width))), most.y);
    float bound = __fmul_rn(most.x, __fadd_rn(of_values, fabsf(sum - d_lse)));
    // 2^(30 − ⌈log2 bound⌉) from the exponent of the bound, so that half of the range is left for what rounding adds to
    // p and ds; NaN if the bound or the sum is not finite.
    int exponent = (int)(__float_as_uint(fmaxf(bound, 1e-30f)) >> 23) - 126;
    return bound < 1e37f && fabsf(sum) < 1e37f ? __uint_as_float((u32)(min(30 - exponent, 126) + 127) << 23)
                                               : __uint_as_float(0x7fc00000);
}
