"""Plain-torch stand-in for the compiled `sgl_kernel` that SGLang 0.5.23 imports on a CPU.

Only the kernels that a DeepSeek-V3-style or Llama target and an EAGLE3 draft reach; page size 1, no FP8 cache.
Everything else of the engine (scheduler, model code, EAGLE worker, HTTP) stays SGLang's own. SGLang calls each
function with exactly the arguments named here and, unless "returns" is said, expects the result in the tensors marked
`out`. Arithmetic is float32.

B requests, N tokens of all requests, n tokens of one, L keys of one, H query heads, Hk key/value heads, D head size.
`req_to_token` [requests, positions] int32: the KV-cache slot of each position of each request.
"""
import ctypes

import torch


# ---- attention: sglang/srt/layers/attention/intel_amx_backend.py ----
def attend(q, k, v, scale, visible, sinks=None):
    """Softmax attention in float32.

    q [B, n, H, D], k [B, L, Hk, D], v [B, L, Hk, Dv], visible [B, n, L] bool -> [B, n, H, Dv]. sinks [H]: a score of
    each head that takes its share of the softmax and has no value (gpt-oss).
    """
    B, n, H, D = q.shape
    Hk, Dv = k.shape[2], v.shape[3]
    # The H / Hk query heads that share a key head become extra rows of one product.
    q = q.float().view(B, n, Hk, H // Hk, D).permute(0, 2, 3, 1, 4).reshape(B, Hk, -1, D)  # (B, Hk, H/Hk * n, D)
    scores = q @ k.float().permute(0, 2, 3, 1) * scale  # (B, Hk, H/Hk * n, L)
    hidden = ~visible[:, None].expand(B, H // Hk, n, -1).reshape(B, 1, H // Hk * n, -1)
    scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(1, Hk, -1, 1, 1).expand(B, -1, -1, n, 1).reshape(B, Hk, -1, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    out = weights @ v.float().transpose(1, 2)  # (B, Hk, H/Hk * n, Dv)
    return out.view(B, Hk, H // Hk, n, Dv).permute(0, 3, 1, 2, 4).reshape(B, n, H, Dv)


def slots_of(req_to_token, requests, lens):
    """KV-cache slots of each request's first max(lens) positions [B, L], and which of them exist [B, L].

    Past a request's length stands its first slot again: the table holds leftovers there, and a masked NaN would still
    spoil the sum.
    """
    exists = torch.arange(int(lens.max())) < lens[:, None]
    slots = req_to_token[requests.long(), :exists.shape[1]].long()
    return torch.where(exists, slots, slots[:, :1]), exists


def gather(k_buffer, v_buffer, slots):
    """Keys and values in `slots` [B, L], each [B, L, Hk, D]. (index_select is seven times as fast as indexing here.)"""
    def rows(buffer):
        return buffer.index_select(0, slots.flatten()).view(*slots.shape, *buffer.shape[1:])

    keys = rows(k_buffer)
    shared = v_buffer.data_ptr() == k_buffer.data_ptr()  # MLA: the values are the first columns of the keys
    return keys, keys[..., :v_buffer.shape[-1]] if shared else rows(v_buffer)


def refuse_unsupported(logit_cap, is_cross, encoder_lens, k_scale=1.0, v_scale=1.0):
    if logit_cap or is_cross or encoder_lens is not None or (k_scale, v_scale) != (1.0, 1.0):
        raise NotImplementedError("cpu_engine: no logit cap, cross attention or scaled KV cache.")


def extend_attention_cpu(q, k, v, out, k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens,
                         extend_seq_lens, extend_start_loc, max_extend_len, scale, logit_cap, is_cross, window,
                         encoder_lens, sinks, tree_mask,
                         is_causal=True):
    """Prefill, chunked prefill and EAGLE verification: the last n positions of each request attend to all up to
    themselves.

    Caller: IntelAMXAttnBackend.forward_extend. q [N, H, D]; out [N, H, Dv]; k, v: the new positions' keys and values,
    or None when they are in the cache already; seq_lens count them. Earlier keys come from the buffers [slots, Hk,
    D]. Without earlier ones MLA passes full-width keys and values while the buffers hold latents. tree_mask: for each
    request n * n flags, which draft token sees which.
    """
    refuse_unsupported(logit_cap, is_cross, encoder_lens, k_scale, v_scale)
    news, starts = extend_seq_lens.tolist(), extend_start_loc.tolist()
    masks = iter(tree_mask[:sum(n * n for n in news)].split([n * n for n in news])) if tree_mask is not None else None
    # Equal lengths (verification) go as one batch; unequal ones (prefill) one by one, which wastes nothing on padding.
    together = len(set(news)) == 1 and starts == list(range(0, len(news) * news[0], news[0]))
    for rows in [range(len(news))] if together else [[i] for i in range(len(news))]:
        n, B, start = news[rows[0]], len(rows), starts[rows[0]]
        lens, tokens = seq_lens[rows], slice(start, start + n * B)
        before = lens - n
        new_k, new_v = (None if x is None else x[tokens].view(B, n, -1, width)
                        for x, width in ((k, q.shape[-1]), (v, out.shape[-1])))
        if new_k is not None and not before.any():
            keys, values, exists = new_k, new_v, torch.ones(B, n, dtype=torch.bool)
        else:
            slots, exists = slots_of(req_to_token, req_pool_indices[rows], lens)
            keys, values = gather(k_buffer, v_buffer, slots)  # (B, L, Hk, D)
            if new_k is not None:
                where = torch.arange(B)[:, None], before[:, None] + torch.arange(n)
                keys[where], values[where] = new_k.to(keys.dtype), new_v.to(values.dtype)
        at = (before[:, None] + torch.arange(n))[..., None]  # (B, n, 1): position of each query
        key_at = torch.arange(exists.shape[1])
        visible = exists[:, None] & (key_at <= at if is_causal else True)  # (B, n, L)
        if window > 0:
            visible &= key_at > at - window
        if masks is not None:
            for i, row in enumerate(rows):
                visible[i, :, before[i]:lens[i]] = next(masks).view(n, n).bool()
        attended = attend(q[tokens].view(B, n, *q.shape[1:]), keys, values, scale, visible, sinks)
        out[tokens] = attended.to(out.dtype).flatten(0, 1)


def decode_attention_cpu(q, k_buffer, v_buffer, k_scale, v_scale, out, k, v, loc, attn_logits, req_to_token,
                         req_pool_indices, seq_lens, scale, logit_cap, is_cross, window, encoder_lens, sinks):
    """One new token for each request: stores its key and value in slot `loc` [B], then attends over the request's
    seq_lens positions.

    Caller: IntelAMXAttnBackend.forward_decode, for the target and for each draft step. q [B, H, D]; out [B, H, Dv];
    k, v may be None. MLA's v_buffer is a view of k_buffer's first columns. attn_logits is scratch of the compiled
    kernel, unused here.
    """
    refuse_unsupported(logit_cap, is_cross, encoder_lens, k_scale, v_scale)
    if k is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        if v_buffer.data_ptr() != k_buffer.data_ptr():
            v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    slots, visible = slots_of(req_to_token, req_pool_indices, seq_lens)
    if window > 0:
        visible &= torch.arange(visible.shape[1]) >= (seq_lens - window)[:, None]
    out.copy_(attend(q[:, None], *gather(k_buffer, v_buffer, slots), scale, visible[:, None],
                    sinks)[:, 0])


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """Returns the slot table of the draft branches [B * topk, max(seq_lens) + num_steps]: the prefix, then the
    branch's own slots.

    Caller: IntelAMXMultiStepDraftBackend.init_forward_metadata. Branch t of a request owns num_steps slots from
    seq_len + t * num_steps on.
    """
    table = torch.zeros(len(seq_lens) * topk, int(seq_lens.max()) + num_steps, dtype=req_to_token.dtype)
    for b, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        own = req_to_token[request, length:length + topk * num_steps].view(topk, num_steps)
        table[b * topk:(b + 1) * topk, :length] = req_to_token[request, :length]
        table[b * topk:(b + 1) * topk, length:length + num_steps] = own
    return table


# ---- slots of the KV cache: sglang/srt/mem_cache/allocation.py, sglang/kernels/ops/speculative/cache_locs.py,
# .../kvcache/cache_move.py
# ----
def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, slots, pool_len):
    """out: req_to_token[request, start:end] of each request takes the next of `slots` [sum(end - start)]. Caller:
    assign_req_to_token_pool_func.
    """
    spans = list(zip(req_pool_indices.tolist(), start.tolist(), end.tolist()))
    for (request, first, last), own in zip(spans, slots.split([last - first for _, first, last in spans])):
        req_to_token[request, first:last] = own.to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out, pool_len):
    """out [>= sum(end - start)]: the slots req_to_token[request, start:end], request after request.

    Callers: assign_extend_cache_locs_func, fill_front_out_cache_loc_func.
    """
    spans = zip(req_pool_indices.tolist(), start.tolist(), end.tolist())
    slots = torch.cat([req_to_token[request, first:last] for request, first, last in spans])
    out[:len(slots)] = slots.to(out.dtype)


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices, req_to_token, seq_lens, out, pool_len, topk, num_steps):
    """out [B * topk * num_steps]: the slots after each request's seq_len.

    Caller: assign_draft_cache_locs_contiguous_func.
    """
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out, pool_len)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, target_slots, source_slots):
    """Copy cache rows source -> target in every buffer; data_ptrs and strides (bytes a row) name the buffers. Caller:
    copy_all_layer_kv_cache_func.
    """
    for base, stride in zip(data_ptrs.tolist(), strides.tolist()):
        # All are read before any is written
        rows = [ctypes.string_at(base + slot * stride, stride) for slot in source_slots.tolist()]
        for slot, row in zip(target_slots.tolist(), rows):
            ctypes.memmove(base + slot * stride, row, stride)


# ---- EAGLE: sglang/kernels/ops/speculative/eagle.py and spec_tree.py ----
def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride):
    """out bonus_tokens [B]: the last accepted token of each request; accept_tokens [B * stride], accept_lens count
    it. Caller: fill_bonus_tokens_func.
    """
    last = torch.arange(len(bonus_tokens)) * stride + accept_lens[:len(bonus_tokens)] - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last.long()])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """out accept_out_cache_loc: out_cache_loc at the accepted indices (-1: rejected), packed to the front. Caller:
    fill_accept_out_cache_loc_func.
    """
    kept = accept_index[accept_index > -1].long()
    accept_out_cache_loc[:len(kept)] = out_cache_loc[kept].to(accept_out_cache_loc.dtype)


def build_tree_kernel_efficient_cpu(parent_list, selected_index, seq_lens, tree_mask, positions, retrieve_index,
                                    next_token, next_sibling, topk, depth, draft_token_num, mode):
    """The token tree to verify. Token 0 of each request is its last emitted one (the root), tokens 1.. are drafts.

    Caller: build_tree_kernel_efficient_func. selected_index [B, n - 1]: index of draft i among all candidates, where
    candidate c hangs below parent_list[b, c // topk] (c // topk == 0: the root). out tree_mask [B * n * n] bool:
    which token sees which; positions [B * n]; retrieve_index [B, n]: row in the batch; next_token [B, n]: first
    child, next_sibling [B, n]: next child of the same parent, both -1 (as they come) where there is none.
    """
    if int(mode) != 1:
        raise NotImplementedError("cpu_engine: only the QLEN_ONLY tree mask, SGLang's choice on a CPU.")
    B, n = retrieve_index.shape
    retrieve_index.copy_(torch.arange(B * n).view(B, n))
    see, parents = tree_mask[:B * n * n].view(B, n, n), parent_list.reshape(B, parent_list.numel() // B).tolist()
    for b, chosen in enumerate(selected_index.tolist()):
        token_of = {candidate: i + 1 for i, candidate in reversed(list(enumerate(chosen)))}
        parent = [None] + [0 if c < topk else token_of.get(parents[b][c // topk]) for c in chosen]
        for token in range(n - 1, 0, -1):  # backwards, so that the first child ends up at the head of its list
            if parent[token] is not None:
                next_sibling[b, token] = next_token[b, parent[token]]
                next_token[b, parent[token]] = token
        see[b] = False
        for token in range(n):
            path, up = [0, token], parent[token]
            while up and len(path) <= depth:
                path.append(up)
                up = parent[up]
            see[b, token, path] = True
            positions[b * n + token] = seq_lens[b] + (len(path) - 1 if token else 0)


def verify_tree_greedy_cpu(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
                           retrive_next_sibling, target_predict):
    """Walk each tree along the target's argmax. Caller: verify_tree_greedy_func, by keyword.

    candidates [B, n]: token ids of the tree; target_predict [B, n]: the target's argmax after each. out predicts [B *
    n]: the target's token at each accepted row; accept_index [B, steps + 1]: accepted rows, the root first (the rest
    stays -1); accept_token_num [B]: accepted drafts.
    """
    wanted = target_predict.flatten().tolist()
    trees = zip(candidates.tolist(), retrive_index.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist())
    for b, (tokens, rows, child, sibling) in enumerate(trees):
        path, node = [0], 0
        while len(path) < accept_index.shape[1]:
            node = child[node]
            while node != -1 and tokens[node] != wanted[rows[path[-1]]]:
                node = sibling[node]
            if node == -1:
                break
            path.append(node)
        accepted = torch.tensor([rows[node] for node in path])
        accept_index[b, :len(path)] = accepted
        accept_token_num[b] = len(path) - 1
        predicts[accepted] = torch.tensor([wanted[row] for row in accepted.tolist()], dtype=predicts.dtype)


# ---- sampled verification: sglang/srt/speculative/eagle_utils.py, eagle_sample ----
def tree_speculative_sampling_target_only(predicts, accept_index, accept_token_num, candidates, retrive_index,
                                          retrive_next_token, retrive_next_sibling, uniform_samples,
                                          uniform_samples_for_final_sampling, target_probs, draft_probs,
                                          threshold_single=1.0, threshold_acc=1.0, deterministic=True):
    """Walk each tree as the target's sampling has it, after TreeSpeculativeSamplingTargetOnly of SGLang's
    kernels/jit/include/sgl_kernel/speculative/sampling.cuh. By keyword.

    A node's children are tried in turn: one is accepted where the node's coin lies below the target's probability of
    all that were tried there, over threshold_acc, or where its own reaches threshold_single. After the last accepted
    node a token is drawn from what the target has left without the refused children. target_probs, draft_probs [B, n,
    V]; draft_probs (zeros) gets the refused ones; uniform_samples [B, n], ..._for_final_sampling [B]: coins in [0, 1).
    out: as of verify_tree_greedy_cpu.
    """
    tables = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, uniform_samples)
    for b, (tokens, rows, child, sibling, coins) in enumerate(zip(*(table.tolist() for table in tables))):
        path, p, refused, threshold = [0], target_probs[b], draft_probs[b], max(threshold_acc, 1e-9)
        while len(path) < accept_index.shape[1]:
            at, node, tried = path[-1], child[path[-1]], 0.0
            while node != -1:
                own = float(p[at, tokens[node]])
                tried += own
                if own > 0 and (coins[at] < tried / threshold or own >= threshold_single):
                    break
                refused[at, tokens[node]] = own
                node = sibling[node]
            if node == -1:
                break
            path.append(node)
        accept_index[b, :len(path)] = torch.tensor([rows[node] for node in path])
        accept_token_num[b] = len(path) - 1
        left = p[path[-1]] if len(path) == accept_index.shape[1] else (p[path[-1]] - refused[path[-1]]).clamp_min(0)
        below = left.cumsum(0)
        drawn = int((below <= uniform_samples_for_final_sampling[b] * below[-1]).sum())
        valid = left.nonzero()  # a coin that rounding leaves above all: the last token that has any probability
        drawn = drawn if drawn < len(left) else int(valid[-1]) if len(valid) else len(left) - 1
        emitted = [*(tokens[node] for node in path[1:]), drawn]
        predicts[[rows[node] for node in path]] = torch.tensor(emitted, dtype=predicts.dtype)


def top_k_renorm_prob(probs, top_ks):
    """Returns probs [N, V] with the top_ks [N] likeliest tokens of each row (and those as likely as the last), summing
    to 1. As flashinfer.sampling.top_k_renorm_probs.
    """
    ranked = probs.sort(-1, descending=True).values
    least = ranked.gather(1, (top_ks.long().clamp(1, probs.shape[1]) - 1)[:, None])
    kept = probs.where(probs >= least, 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs, top_ps):
    """Returns probs [N, V] with the fewest likeliest tokens that reach top_ps [N] (and those as likely as the last),
    summing to 1. As flashinfer.sampling.top_p_renorm_probs.
    """
    ranked = probs.sort(-1, descending=True).values
    needed = ((ranked.cumsum(-1) - ranked) < top_ps[:, None]).sum(-1)
    return top_k_renorm_prob(probs, needed)


# The attention backend looks its two kernels up here.
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
