"""The cases that run in `make test-slow` only: a test's other cases, or a cheaper test, cover what
CI needs.

Tests that are slow as a whole have the mark themselves. Each line is a regular expression for the
beginning of what follows "tests/" in a test's name.
"""

import re

PATTERNS = r"""
attention/test_attend.py::test_a_chunk_of_queries_is_the_end_of_the_whole\[(?!.*cope)
attention/test_attend.py::test_gradients_under_masks\[mask[012]
attention/test_attend.py::test_the_last_query_stands_at_the_last_key\[(1-6|6-3)
attention/test_attention_fn.py::test_nnx_without_positions_is_flax_attention\[.*2\]
attention/test_attention_fn.py::test_options_dropout_and_type_reach_attend
attention/test_batch_parallel.py::.*\[(blockwise|full)\]
attention/test_blockwise.py::test_encodings_of_other_kinds\[(the (first|second) settles first|reads everything)
attention/test_blockwise.py::test_every_encoding\[(learned|alibi|fire|rope|cope_two|dape|pope|selective_rope)
attention/test_blockwise.py::test_given_masks\[(alibi|rope|relative)
attention/test_blockwise.py::test_one_block_of_keys_whose_places_are_known\[(relative|cope\(position=slope)
attention/test_blockwise.py::test_seeds_side_by_side\[one block
attention/test_blockwise.py::test_the_sizes_taken_by_default\[blocks
attention/test_decode.py::test_blocks_are_scored_until_all_rows_are_saturated_and_no_further\[(1|5)-
attention/test_decode.py::test_chunks_and_single_tokens_equal_the_whole\[(learned|alibi|fire|relative|rope|pope|dape)
attention/test_fused.py::test_devices_share_examples_and_heads\[axes1
attention/test_fused.py::test_every_encoding\[(alibi|t5|cope\(position)
attention/test_fused.py::test_gradients_of_tables_add_up\[(5-7|5-150|130-7|130-128)
attention/test_fused.py::test_rounds_no_more_than_blockwise_attention\[float32
attention/test_fused.py::test_tables_of_several_registers
attention/test_gpu_kernels.py::test_types_vmap_remat_nan_and_a_query_that_sees_no_key
attention/test_native.py::test_it_equals_full_attention\[(cope\(npos_max=2\)|cope\(position=slope|learned)
attention/test_native.py::test_masks\[.*-(37|150-options[25])
attention/test_library.py::test_whatever_fails_is_one_line_and_attention_goes_on\[(too old|slow|no cache)
attention/test_precision.py::test_bfloat16_inputs_keep_float32_positions
attention/test_ring.py::test_it_equals_one_device\[(4-alibi|1-cope|8-none|2-rope)
attention/test_sink.py::test_blocks\[.*(5, 3, 2|4, 13, 1)
attention/test_sink.py::test_blocks\[mask-zero
attention/test_sink.py::test_blocks_beyond_what_is_done_are_not_read\[False
attention/test_sink.py::test_ring\[zero
attention/test_visits.py::test_blocks_beyond_the_largest_position_are_saturated\[(4|9)
attention/test_visits.py::test_blocks_that_are_ruled_out_are_not_read\[(causality|window|documents)
attention/test_visits.py::test_every_pair_is_visited_once_and_no_block_in_vain\[(documents|first|padding)
attention/test_visits.py::test_far_blocks_are_wide\[mask
commands/test_downstream.py::(?!test_wrong_input)
commands/test_inspect.py::test_an_input_a_seed_and_a_folder_can_be_chosen
generation/test_decoding.py::test_a_stream_gives_the_tokens_of_generate\[(1|3)
generation/test_decoding.py::test_padded_prompts_of_several_lengths_need_one_compilation
generation/test_decoding.py::test_what_changes_from_call_to_call_does_not_compile_again
models/test_decoder.py::test_forward_mode_and_hessian_vector_products\[cope
models/test_decoder_oracle.py::test_gradients_equal_differences_of_the_oracle\[(plain|learned\]|rope|cope\]|post-norm|rms|wide|tape,)
models/test_decoder_oracle.py::test_logits_equal_the_oracle\[(plain|learned\]|rope|cope\]|post-norm\]|rms|tape,)
models/test_decoding.py::test_each_row_of_a_padded_batch_is_as_if_alone\[(?!.*cope)
models/test_tagger.py::test_dropout_is_on_the_input_between_the_layers_and_on_the_top\[(input|top)
"""
_SLOW = re.compile("|".join(f"tests/{line}" for line in PATTERNS.strip().splitlines()))


def is_slow(node_id: str) -> bool:
    """True if CI leaves this case out."""
    return _SLOW.match(node_id) is not None
